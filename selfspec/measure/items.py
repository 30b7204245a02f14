"""Prompts as token ids, once for all methods, and the check that the model can hold them."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.decoding.requests import check_length, encode_prompt
from selfspec.errors import UserError
from selfspec.measure.protocol import Item
from selfspec.prompts import Prompt
from selfspec.target import Target


def make_item(target: Target, prompt: Prompt, answers: tuple[str, ...] = ()) -> Item:
    """The prompt's next turn after these answers, as a chat if the model has a template, else as plain text."""
    turn = len(answers)
    said = [text for pair in zip(prompt.turns, answers, strict=False) for text in pair] + [prompt.turns[turn]]
    if getattr(target.tokenizer, "chat_template", None):
        roles = ("user", "assistant")
        token_ids = encode_prompt(target, [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)])
    else:
        token_ids = encode_prompt(target, "\n\n".join(said))
    more = turn + 1 < len(prompt.turns)
    return Item(
        prompt_id=prompt.prompt_id if turn == 0 else f"{prompt.prompt_id}#{turn + 1}",
        category=prompt.category,
        token_ids=token_ids,
        follow=(lambda answer: make_item(target, prompt, (*answers, answer))) if more else None,
    )


def check_names(prompts: Sequence[Prompt]) -> None:
    """UserError for a text that is no valid Unicode, or an id that is another prompt's further turn (`a` and `a#2`)."""
    later_turns = {f"{one.prompt_id}#{turn + 1}": one.prompt_id for one in prompts for turn in range(1, len(one.turns))}
    for prompt in prompts:
        if prompt.prompt_id in later_turns:
            raise UserError(
                f"prompt {prompt.prompt_id!r} has the name that a further turn of prompt "
                f"{later_turns[prompt.prompt_id]!r} gets. Results are kept by it: give one of them another id."
            )
        if broken := next((text for text in prompt.turns if not _encodes(text)), None):
            raise UserError(
                f"prompt {prompt.prompt_id!r} holds half of a character (a lone surrogate, {broken[:40]!r}), which no "
                "tokenizer reads. Write the text as UTF-8."
            )


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def longest_prompt(target: Target, prompts: Sequence[Prompt], max_new_tokens: int) -> int:
    """Tokens of the longest prompt, its earlier answers included (at most `max_new_tokens` each).

    Raises UserError naming a prompt that leaves no room for `max_new_tokens` within the model's positions.
    """
    longest = 0
    check_names(prompts)
    for prompt in prompts:
        num_answers = len(prompt.turns) - 1
        last_turn = make_item(target, prompt, ("",) * num_answers)
        length = len(last_turn.token_ids) + num_answers * max_new_tokens
        try:
            check_length(target, length, max_new_tokens)
        except UserError as error:
            raise UserError(f"prompt {prompt.prompt_id!r}: {error}") from error
        longest = max(longest, length)
    return longest
