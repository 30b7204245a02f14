"""A bandit over (exit layer, K): each round plays the arm that may be the best one, by what it has brought so far.

An arm's worth is tokens per second, Σ emitted / Σ time over its rounds (a mean of ratios would favour
short rounds). UCB1 on that ratio, scaled by the best arm's: worth + exploration · best · sqrt(ln n / n_arm). Sums fade
with a half-life, so the bandit follows the text. Every arm is played twice first, the first play not counted: it may
have to build kernels.

Exit layers are for drafters that exit early (`early_exit`); for others leave `exit_layers` out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from selfspec.errors import UserError
from selfspec.lookahead.plan import Plan, RoundOutcome


@dataclass
class Arm:
    plan: Plan
    plays: float = 0.0
    emitted: float = 0.0
    time_s: float = 0.0

    @property
    def worth(self) -> float:
        return self.emitted / self.time_s if self.time_s else 0.0


@dataclass
class Bandit:
    """num_drafted: the K to choose from (0: no draft). exit_layers: the exits to choose from; None: the drafter's own.
    exploration: 0 plays the best arm so far. half_life: rounds after which an observation counts half.
    """

    num_drafted: Sequence[int] = (0, 1, 2, 4, 8)
    exit_layers: Sequence[int] | None = None
    exploration: float = 0.3
    half_life: float = 500.0
    _arms: list[Arm] = field(init=False, repr=False)
    _warm: set[Plan] = field(init=False, repr=False, default_factory=set)

    def __post_init__(self) -> None:
        lengths = list(self.num_drafted)
        exits: list[int | None] = list(self.exit_layers) if self.exit_layers else [None]
        if not lengths or any(isinstance(k, bool) or not isinstance(k, int) or k < 0 for k in lengths):
            raise UserError(f"num_drafted={lengths} is not possible: give whole numbers, 0 or more.")
        if any(isinstance(e, bool) or not (e is None or (isinstance(e, int) and e > 0)) for e in exits):
            raise UserError(f"exit_layers={exits} is not possible: give numbers of layers, 1 or more.")
        if max(lengths) == 0:
            raise UserError("num_drafted=[0] never drafts: give at least one K of 1 or more.")
        if not self.exploration >= 0 or not self.half_life > 0:
            raise UserError("exploration must be 0 or more, half_life above 0.")
        drafting = [Plan(k, exit_layer=exit_) for exit_, k in product(exits, lengths) if k > 0]
        self._arms = [Arm(plan) for plan in ([Plan(0)] if 0 in lengths else []) + drafting]

    @property
    def max_drafted(self) -> int:
        return max(arm.plan.num_drafted for arm in self._arms)

    def choose(self) -> Plan:
        for arm in self._arms:
            if arm.plays == 0:
                return arm.plan
        total = sum(arm.plays for arm in self._arms)
        scale = self.exploration * max(arm.worth for arm in self._arms)
        return max(self._arms, key=lambda arm: arm.worth + scale * math.sqrt(math.log(total) / arm.plays)).plan

    def observe(self, outcome: RoundOutcome) -> None:
        if outcome.plan not in self._warm:
            self._warm.add(outcome.plan)
            return
        keep = 0.5 ** (1 / self.half_life)
        for arm in self._arms:
            arm.plays, arm.emitted, arm.time_s = keep * arm.plays, keep * arm.emitted, keep * arm.time_s
            if arm.plan == outcome.plan:
                arm.plays += 1
                arm.emitted += sum(outcome.num_emitted)
                arm.time_s += outcome.round_s
