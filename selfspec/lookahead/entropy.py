"""Stop where the draft's entropy bounds its acceptance from above too low: AdaEDL (Agrawal et al. 2024, 2410.18351).

The chance that a drafted token is accepted is at least 1 − sqrt(γ H(q)), H in nats; a draft goes on while that bound is
at least `threshold`. Unlike the confidence of the drawn token, it does not depend on which token was drawn.
Cost: a sum over V per drafted token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from selfspec.errors import UserError
from selfspec.lookahead.confidence import Threshold, check_max_drafted, check_probability
from selfspec.lookahead.plan import Plan, draft_probabilities


@dataclass
class Entropy:
    """gamma: how much of the entropy counts (0.2 as published). threshold: the least bound at which a draft goes on."""

    threshold: float = 0.3
    gamma: float = 0.2
    max_drafted: int = 8
    _threshold: Threshold = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_probability("threshold", self.threshold)
        check_max_drafted(self.max_drafted)
        if not self.gamma > 0:
            raise UserError(f"gamma={self.gamma!r} is not possible: allowed is a number above 0.")
        self._threshold = Threshold(self.threshold)

    def choose(self) -> Plan:
        return Plan(self.max_drafted)

    def start(self, device: torch.device) -> None:
        self._threshold.start(device)

    def goes_on(self, logits_BV: Tensor, q_BV: Tensor | None, token_B: Tensor, step: int) -> Tensor:
        q_BV = draft_probabilities(logits_BV, q_BV)
        entropy_B = torch.special.entr(q_BV).sum(-1)
        return self._threshold.passed_by(1 - (self.gamma * entropy_B).sqrt())
