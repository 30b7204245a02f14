"""What the user asks of the sampler, checked once so that nothing below has to check it again.

Names, ranges and defaults are those of `transformers.GenerationConfig` where it has the setting; presence and
frequency penalties are OpenAI's and vLLM's (generated tokens only). Temperature 0 means greedy. Costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from selfspec.errors import UserError

LEAST_TEMPERATURE = 1e-30  # a float32 logit of a hundred million divided by it is still finite


@dataclass(frozen=True)
class Sampling:
    """The sampling transforms of one run, the same for target and draft. Raises UserError on a value out of range."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] | None = None
    suppress_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _require(
            _is_number(self.temperature) and self.temperature >= 0,
            "temperature",
            self.temperature,
            "0 (greedy) or a positive number",
        )
        _require(
            self.temperature == 0 or self.temperature >= LEAST_TEMPERATURE,
            "temperature",
            self.temperature,
            f"0 (greedy) or at least {LEAST_TEMPERATURE:g}: divided by less, logits overflow. Use 0",
        )
        _require(
            _is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]; 1 turns it off"
        )
        _require(_is_count(self.top_k), "top_k", self.top_k, "a whole number; 0 turns it off")
        _require(
            _is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "a number in [0, 1]; 0 turns it off"
        )
        _require(
            _is_number(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty",
            self.repetition_penalty,
            "a positive number; 1 turns it off",
        )
        _require(
            _is_number(self.presence_penalty),
            "presence_penalty",
            self.presence_penalty,
            "a finite number; 0 turns it off",
        )
        _require(
            _is_number(self.frequency_penalty),
            "frequency_penalty",
            self.frequency_penalty,
            "a finite number; 0 turns it off",
        )
        _require(
            _is_count(self.no_repeat_ngram_size),
            "no_repeat_ngram_size",
            self.no_repeat_ngram_size,
            "a whole number; 0 turns it off",
        )
        object.__setattr__(self, "suppress_tokens", tuple(self.suppress_tokens or ()))
        for token in self.suppress_tokens:
            _require(_is_count(token), "suppress_tokens", self.suppress_tokens, "token ids, each 0 or larger")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
            for token, bias in dict(self.logit_bias).items():
                _require(
                    _is_count(token), "logit_bias", self.logit_bias, "a mapping from token id (0 or larger) to bias"
                )
                _require(
                    isinstance(bias, int | float) and not math.isnan(bias) and bias != math.inf,
                    "logit_bias",
                    self.logit_bias,
                    "biases that are finite, or -inf to forbid the token",
                )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _require(ok: bool, name: str, given: object, allowed: str) -> None:
    if not ok:
        raise UserError(f"Sampling({name}={given!r}): {name} must be {allowed}.")
