"""Prompts in the chat model's own words: given its template up to the user's turn, an instruct model writes questions.

Its bare header alone yields short, varied questions. Openers ("Summarize the following", "Write a function") steer a
share of them towards tasks the bare header rarely asks for. Prompt and answer are written in the same row, one after
the other, so an answer's prompt is already in the cache (`selfspec.training.generation`).
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from selfspec.errors import UserError
from selfspec.training.data import DataConfig, Sample
from selfspec.training.generation import Finished, Request
from selfspec.training.prompt_sources import GivenPrompt

MARK = "\u2402user turn\u2403"  # survives every template unchanged, and no template holds it


@dataclass(frozen=True)
class ChatTemplate:
    """The text a chat model sees before and after the first user message. raw: nothing, a base model reads the prompt
    as its tokenizer gives it.
    """

    before: str
    after: str
    raw: bool = False

    def token_ids(self, tokenizer: Any, prompt: str) -> list[int]:
        """The whole prompt as ids, as `apply_chat_template(..., add_generation_prompt=True)` makes them."""
        return list(tokenizer(self.before + prompt + self.after, add_special_tokens=self.raw).input_ids)


def template_of(tokenizer: Any) -> ChatTemplate:
    """The tokenizer's template, or none at all for a base model, which answers given prompts by going on."""
    if not getattr(tokenizer, "chat_template", None):
        return ChatTemplate("", "", raw=True)
    return chat_template(tokenizer)


def chat_template(tokenizer: Any) -> ChatTemplate:
    """Split the tokenizer's template around the user message. UserError if it has none or changes the message."""
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "The target's tokenizer has no chat template, so it cannot write prompts itself. "
            "Use an instruct model, or give the prompts: prompt_file=<jsonl with a 'prompt' per line>."
        )
    turn = [{"role": "user", "content": MARK}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    if text.count(MARK) != 1:
        raise UserError(
            f"The chat template renders the user message {text.count(MARK)} times; exactly once is needed to split it. "
            "Load the target with a tokenizer whose template does."
        )
    before, after = text.split(MARK)
    return ChatTemplate(before, after)


def normalised(prompt: str) -> str:
    """Prompts that are equal but for case, spaces and punctuation count as the same one."""
    return re.sub(r"\W+", " ", prompt.lower()).strip()


def is_held_out(prompt: str, share: float) -> bool:
    """Decided by the hash of the prompt, or of what it was made from: equal ones fall on the same side in every run."""
    digest = hashlib.sha256(normalised(prompt).encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def reject_reason(prompt: str, special_tokens: Sequence[str]) -> str | None:
    """Why a self-written prompt is not used, or None. Cheap and blunt: the answers, not the prompts, are the data."""
    words = normalised(prompt).split()
    if len(words) < 3:
        return "too_short"
    if "\ufffd" in prompt or any(ord(sign) < 32 and sign not in "\n\t" for sign in prompt):
        return "broken_text"
    if any(token in prompt for token in special_tokens):
        return "special_token"
    if len(words) >= 20 and len(set(words)) < 0.35 * len(words):
        return "repetitive"
    return None


class SampleSource:
    """Hands out requests for `generate_stream` and collects samples: prompt, then its answer, then the next index.

    `prompts` None: the target writes them. Otherwise request i answers prompts[i].
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Any,
        eos_ids: Sequence[int],
        prompts: Sequence[GivenPrompt] | None,
        done: set[int],
        seen: set[str],
        on_result: Callable[[int, Sample | str], bool],
    ) -> None:
        """`on_result(index, sample or reason of rejection)` returns False when enough has been made."""
        self.config, self.tokenizer, self.eos_ids, self.prompts = config, tokenizer, set(eos_ids), prompts
        self.template = template_of(tokenizer)
        self.done, self.seen, self.on_result = done, seen, on_result
        self.next_index = 0
        self.wanting = True
        self.texts: dict[int, str] = {}  # prompts whose answer is being written
        self.rejected: Counter[str] = Counter()

    def __call__(self, finished: Finished | None) -> Request | None:
        if finished is not None and finished.request.kind == "prompt":
            answer = self._after_prompt(finished)
            if answer is not None:
                return answer
        elif finished is not None:
            self._after_answer(finished)
        while self.wanting:
            index = self._take_index()
            if index is None:
                return None
            if self.prompts is None:
                return self._prompt_request(index)
            answer = self._answer_request(index, self.prompts[index].text)
            if answer is not None:
                return answer
        return None

    def _take_index(self) -> int | None:
        while self.next_index in self.done:
            self.next_index += 1
        index, self.next_index = self.next_index, self.next_index + 1
        return index if self.prompts is None or index < len(self.prompts) else None

    def _prompt_request(self, index: int) -> Request:
        config = self.config
        draw = np.random.Generator(np.random.Philox(key=[config.seed, index]))
        opener = "" if draw.random() < config.bare_share or not config.openers else str(draw.choice(config.openers))
        self.texts[index] = opener
        return Request(
            index,
            list(self.tokenizer(self.template.before + opener, add_special_tokens=False).input_ids),
            config.max_prompt_tokens,
            config.prompt_temperature,
            config.prompt_min_p,
            kind="prompt",
        )

    def _after_prompt(self, finished: Finished) -> Request | None:
        index = finished.request.index
        opener = self.texts.pop(index)
        if not self.wanting:
            return None
        if finished.new_ids[-1] not in self.eos_ids:
            self._reject(index, "too_long")
            return None
        prompt = (opener + self.tokenizer.decode(finished.new_ids[:-1])).strip()
        return self._answer_request(index, prompt)

    def _answer_request(self, index: int, prompt: str) -> Request | None:
        config = self.config
        reason = reject_reason(prompt, self.tokenizer.all_special_tokens) if self.prompts is None else None
        if reason is None and normalised(prompt) in self.seen:
            reason = "duplicate"
        token_ids = self.template.token_ids(self.tokenizer, prompt)
        if reason is None and len(token_ids) > config.max_sequence_tokens - config.max_new_tokens:
            reason = "too_long"
        if reason is not None:
            self._reject(index, reason)
            return None
        self.seen.add(normalised(prompt))
        self.texts[index] = prompt
        draw = np.random.Generator(np.random.Philox(key=[config.seed + 1, index]))
        low, high = config.answer_temperatures
        temperature = 0.0 if draw.random() < config.greedy_share else float(draw.uniform(low, high))
        return Request(index, token_ids, config.max_new_tokens, temperature)

    def _after_answer(self, finished: Finished) -> None:
        request = finished.request
        prompt = self.texts.pop(request.index)
        sample = Sample(
            index=request.index,
            token_ids=[*request.token_ids, *finished.new_ids],
            prompt_len=len(request.token_ids),
            temperature=request.temperature,
            held_out=is_held_out(self._origin(request.index, prompt), self.config.held_out_share),
        )
        self.wanting = self.on_result(request.index, sample) and self.wanting

    def _origin(self, index: int, prompt: str) -> str:
        return prompt if self.prompts is None else self.prompts[index].origin

    def _reject(self, index: int, reason: str) -> None:
        self.rejected[reason] += 1
        self.wanting = self.on_result(index, reason) and self.wanting
