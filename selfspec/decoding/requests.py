"""What comes in and what goes out: prompts of any kind as token ids, and one `Output` per prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from selfspec.errors import UserError
from selfspec.records import RoundRecord
from selfspec.target import Target

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclass
class Request:
    """One prompt on its way: its index in the call, its tokens, and the number that names it in the noise."""

    index: int
    prompt_ids: list[int]
    max_new_tokens: int
    noise_id: int


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
    prefill_s: float = 0.0
    ttft_s: float = 0.0  # from the start of the prompt's prefill to the commit of the first round
    decode_s: float = 0.0
    alpha_sum: float = 0.0  # Σ over tested positions of Σ_v min(p, q)
    alpha_count: int = 0


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
