"""Draft until the draft doubts itself: stop after a token that had a probability below a threshold.

`confidence` keeps the threshold (dynamic speculation in transformers: Mamou et al. 2024, arXiv 2405.04304, which stops
on the same number). `adaptive_threshold` moves it towards a set acceptance rate after each round (Draft & Verify, Zhang
et al. 2024, arXiv 2309.08168, section 3.3):

    r  <- β1 r + (1 − β1) accepted / drafted
    γ' <- γ + ε if r < target, γ if the draft was as long as allowed, else γ − ε
    γ  <- β2 γ + (1 − β2) γ'

The token that ends a draft is verified like the others. Cost: one gather per drafted token (at temperature 0 also a
softmax over V, which greedy drafting does not need by itself).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from selfspec.errors import UserError
from selfspec.lookahead.plan import Plan, RoundOutcome, draft_probabilities


class Threshold:
    """A number on the device, at an address that stays (a captured round reads it there)."""

    def __init__(self, value: float) -> None:
        self.value = value
        self._on_device: Tensor | None = None

    def start(self, device: torch.device) -> None:
        if self._on_device is None or self._on_device.device != device:
            self._on_device = torch.tensor(self.value, dtype=torch.float32, device=device)

    def set(self, value: float) -> None:
        self.value = value
        if self._on_device is not None:
            self._on_device.fill_(value)

    def passed_by(self, confidence_B: Tensor) -> Tensor:
        assert self._on_device is not None, "start() comes first"
        return confidence_B >= self._on_device


def confidence(logits_BV: Tensor, q_BV: Tensor | None, token_B: Tensor) -> Tensor:
    """`[B]`: how likely the drawn token was under the draft."""
    return draft_probabilities(logits_BV, q_BV).gather(1, token_B[:, None])[:, 0]


@dataclass
class Confidence:
    """threshold: a token less likely than this under the draft is its row's last. max_drafted: the longest draft."""

    threshold: float = 0.4
    max_drafted: int = 8
    _threshold: Threshold = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_probability("threshold", self.threshold)
        check_max_drafted(self.max_drafted)
        self._threshold = Threshold(self.threshold)

    def choose(self) -> Plan:
        return Plan(self.max_drafted)

    def start(self, device: torch.device) -> None:
        self._threshold.start(device)

    def goes_on(self, logits_BV: Tensor, q_BV: Tensor | None, token_B: Tensor, step: int) -> Tensor:
        return self._threshold.passed_by(confidence(logits_BV, q_BV, token_B))


@dataclass
class AdaptiveThreshold:
    """threshold: the first one. target_rate: accepted/drafted that is aimed at. step, rate_memory (β1) and
    threshold_memory (β2): how fast it moves; the defaults are the published ones.
    """

    threshold: float = 0.6
    max_drafted: int = 8
    target_rate: float = 0.9
    step: float = 0.01
    rate_memory: float = 0.5
    threshold_memory: float = 0.9
    _rate: float = field(init=False, repr=False)
    _threshold: Threshold = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("threshold", "target_rate", "step", "rate_memory", "threshold_memory"):
            check_probability(name, getattr(self, name))
        check_max_drafted(self.max_drafted)
        self._rate, self._threshold = self.target_rate, Threshold(self.threshold)

    def choose(self) -> Plan:
        return Plan(self.max_drafted)

    def start(self, device: torch.device) -> None:
        self._threshold.start(device)

    def goes_on(self, logits_BV: Tensor, q_BV: Tensor | None, token_B: Tensor, step: int) -> Tensor:
        return self._threshold.passed_by(confidence(logits_BV, q_BV, token_B))

    def observe(self, outcome: RoundOutcome) -> None:
        """Rows of one round move the threshold together: their drafts are pooled."""
        drafted = sum(outcome.num_drafted)
        if drafted == 0:
            return
        self._rate = self.rate_memory * self._rate + (1 - self.rate_memory) * sum(outcome.num_accepted) / drafted
        now = self._threshold.value
        if self._rate < self.target_rate:
            wanted = now + self.step
        elif drafted == self.max_drafted * len(outcome.num_drafted):
            wanted = now
        else:
            wanted = now - self.step
        moved = self.threshold_memory * now + (1 - self.threshold_memory) * wanted
        self._threshold.set(min(max(moved, 0.0), 1.0))


def check_probability(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise UserError(f"{name}={value!r} is not possible: allowed is a number from 0 to 1.")


def check_max_drafted(value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"max_drafted={value!r} is not possible: allowed is a whole number, 1 or more.")
