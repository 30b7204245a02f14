"""What comes in and what goes out: prompts of any kind as token ids, and one `Output` per prompt."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from selfspec.errors import UserError
from selfspec.records import RoundRecord
from selfspec.target import Target

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclass
class Request:
    """One prompt on its way: its index in the call, its tokens, and the number that names it in the noise.

    It is not there before `arrival_s`, in seconds since the call began.
    """

    index: int
    prompt_ids: list[int]
    max_new_tokens: int
    noise_id: int
    arrival_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Prompt and output, at most."""
        return len(self.prompt_ids) + self.max_new_tokens


@dataclass
class Output:
    """What was generated for one prompt, and how. `token_ids` holds generated tokens only."""

    token_ids: list[int]
    text: str
    finish_reason: str  # "eos" | "stop_string" | "length"
    lossy: bool
    rounds: list[RoundRecord] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_reused_tokens: int = 0  # prompt tokens whose keys and values were in the cache already
    prefill_s: float = 0.0  # from admission; with several rows, rounds of the others may lie in between
    ttft_s: float = 0.0  # from admission to the commit of the first round
    decode_s: float = 0.0
    alpha_sum: float = 0.0  # Σ over tested positions of Σ_v min(p, q)
    alpha_count: int = 0
    arrival_s: float = 0.0  # this, admission to a row, and the commit of each round: seconds since the call began
    admitted_s: float = 0.0
    commit_s: list[float] = field(default_factory=list)


def check_prompts(prompts: object) -> None:
    """UserError unless it is a collection of prompts, of a known size."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Collection):
        given = "one text. Write [text]" if isinstance(prompts, str) else type(prompts).__name__
        raise UserError(f"prompts is a list of prompts; given: {given}.")


def encode_prompt(target: Target, prompt: Prompt) -> list[int]:
    """Token ids of raw text, of a chat (the model's own template, generation prompt added), or ids checked as they
    are.
    """
    if isinstance(prompt, str):
        return _nonempty(_tokenizer(target, "text")(prompt)["input_ids"], prompt)
    if not isinstance(prompt, Sequence):
        raise UserError(f"A prompt is text, a list of token ids or a chat; given: {type(prompt).__name__}.")
    if prompt and all(isinstance(message, Mapping) for message in prompt):
        return encode_chat(target, prompt)  # type: ignore[arg-type]
    ids: list[int] = []
    for token in prompt:
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise UserError(f"A prompt of token ids holds {token!r}; allowed are whole numbers.")
        ids.append(token.__index__())  # type: ignore[union-attr]
    if strange := [token for token in ids if not 0 <= token < target.vocab_size]:
        raise UserError(
            f"Token id {strange[0]} is not in the vocabulary of {target.name}: allowed 0 to {target.vocab_size - 1}."
        )
    return _nonempty(ids, prompt)


def encode_chat(target: Target, messages: Sequence[Mapping[str, str]]) -> list[int]:
    for message in messages:
        if set(message) < {"role", "content"} or not isinstance(message.get("content"), str):
            raise UserError(f"A chat message needs 'role' and 'content' (text); given: {dict(message)!r}.")
    tokenizer = _tokenizer(target, "chat")
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(f"The tokenizer of {target.name} has no chat template; give the prompt as text or token ids.")
    encoded = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=True, return_dict=True)
    return _nonempty(encoded["input_ids"], messages)


def _tokenizer(target: Target, kind: str) -> Any:
    if target.tokenizer is None:
        raise UserError(
            f"The target {target.name} has no tokenizer, so a {kind} prompt cannot be read; give token ids."
        )
    return target.tokenizer


def _nonempty(ids: Sequence[int], prompt: object) -> list[int]:
    if not ids:
        raise UserError(f"The prompt {prompt!r} is empty: there is nothing to condition on. Give at least one token.")
    return list(ids)


def check_length(target: Target, num_prompt_tokens: int, max_new_tokens: int) -> None:
    """UserError when prompt and output together exceed the model's positions."""
    if num_prompt_tokens + max_new_tokens > target.max_positions:
        raise UserError(
            f"A prompt of {num_prompt_tokens} tokens and max_new_tokens={max_new_tokens} need "
            f"{num_prompt_tokens + max_new_tokens} positions; {target.name} has {target.max_positions}. Allowed for "
            f"this prompt: max_new_tokens up to {max(target.max_positions - num_prompt_tokens, 0)}."
        )


def token_counts(max_new_tokens: int | Sequence[int], num_prompts: int) -> list[int]:
    """`max_new_tokens` of each prompt. UserError unless it is a whole number above 0, or one for each prompt."""
    if isinstance(max_new_tokens, str) or not isinstance(max_new_tokens, Sequence):
        _check_count("max_new_tokens", max_new_tokens)
        return [max_new_tokens] * num_prompts
    for index, count in enumerate(max_new_tokens):
        _check_count(f"max_new_tokens[{index}]", count)
    if len(max_new_tokens) != num_prompts:
        raise UserError(
            f"max_new_tokens holds {len(max_new_tokens)} numbers for {num_prompts} prompts: give one for each prompt, "
            "or one number for all."
        )
    return list(max_new_tokens)


def _check_count(name: str, count: object) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UserError(f"{name}={count!r} is not possible: allowed is a whole number, 1 or more.")


def arrival_times(arrivals_s: Sequence[float] | None, num_prompts: int) -> list[float]:
    """When each prompt comes in. UserError unless there is one time, 0 or later, for each prompt."""
    if arrivals_s is None:
        return [0.0] * num_prompts
    if not isinstance(arrivals_s, Sequence):
        raise UserError(f"arrivals_s={arrivals_s!r} is not possible: give one time, in seconds, for each prompt.")
    if len(arrivals_s) != num_prompts:
        raise UserError(f"arrivals_s holds {len(arrivals_s)} times for {num_prompts} prompts: give one for each.")
    for index, arrival_s in enumerate(arrivals_s):
        if isinstance(arrival_s, bool) or not isinstance(arrival_s, int | float) or not 0 <= arrival_s < math.inf:
            raise UserError(f"arrivals_s[{index}]={arrival_s!r} is not possible: allowed are seconds, 0 or more.")
    return [float(arrival_s) for arrival_s in arrivals_s]
