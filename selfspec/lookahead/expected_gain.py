"""Draft as many tokens as bring the most tokens per second, by what rounds have cost and how often drafts have stood.

    rate(K) = (1 + Σ_{k<=K} Π_{i<=k} a_i) / cost(K)

a_i is the share of rounds that accepted draft i of those that accepted all before it; a draft that ended before its i
(a lookup without a match) counts as one that did not stand. cost(K) is what a round with K drafts takes, whatever it is
made of (draft, verify, management, and on a GPU the graph), relative to other K: `round_costs`. K = 0 is a candidate
like any other: a draft that does not pay is not made. Nothing has to be told beforehand, and nothing is probed by a
timetable:

- what is not known is taken to be good: a draft stands as the one before it does, and a K that was measured little is a
  little cheaper than it seems. So what may pay is tried, and what was tried in vain is left;
- what is known is forgotten with a half-life. So what has been left for long is not known any more, and is tried again.
  A draft that never pays costs about 2% of the time that way: the dearer it is, the rarer it is made.

Cost: ten microseconds of arithmetic on the host per round. The choice depends on clocks, so the rounds differ from run
to run; the output's distribution does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from selfspec.errors import UserError
from selfspec.lookahead.confidence import check_max_drafted
from selfspec.lookahead.plan import Plan, RoundOutcome
from selfspec.lookahead.round_costs import RoundCosts

PRIOR_TESTS, PRIOR_RATE = 2.0, 0.9  # a position starts with so many tests like the position before, the first at 0.9


@dataclass
class ExpectedGain:
    """max_drafted: the largest K. half_life: rounds after which an observation counts half."""

    max_drafted: int = 8
    half_life: float = 100.0
    _tested: list[float] = field(init=False, repr=False)  # per position, faded
    _accepted: list[float] = field(init=False, repr=False)
    _costs: RoundCosts = field(init=False, repr=False)
    _best: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_max_drafted(self.max_drafted)
        if not self.half_life > 0:
            raise UserError(f"half_life={self.half_life!r} is not possible: allowed is a number above 0.")
        self._tested, self._accepted = [0.0] * self.max_drafted, [0.0] * self.max_drafted
        self._costs = RoundCosts(self.max_drafted, self._keep)
        self._best = self.max_drafted  # it shows all positions' acceptance

    @property
    def _keep(self) -> float:
        return 0.5 ** (1 / self.half_life)

    def choose(self) -> Plan:
        return Plan(self._best)

    def observe(self, outcome: RoundOutcome) -> None:
        num_drafted = outcome.plan.num_drafted
        self._count(num_drafted, outcome.num_accepted)
        self._costs.observe(num_drafted, outcome.round_s)
        self._best = self._find_best()

    def _count(self, num_drafted: int, num_accepted: list[int]) -> None:
        """Every position forgets, also those that this round did not test."""
        keep = self._keep
        for position in range(self.max_drafted):
            self._tested[position] *= keep
            self._accepted[position] *= keep
        for accepted in num_accepted:
            for position in range(min(accepted + 1, num_drafted)):
                self._tested[position] += 1
                self._accepted[position] += position < accepted

    def _find_best(self) -> int:
        """K of the highest rate; no draft until it is known what that costs, since all others are held against it."""
        if not self._costs.known(0):
            return 0
        best, best_rate = 0, 1.0 / self._costs.cost(0)
        emitted, path, rate = 1.0, 1.0, PRIOR_RATE
        for k in range(1, self.max_drafted + 1):
            rate = (self._accepted[k - 1] + PRIOR_TESTS * rate) / (self._tested[k - 1] + PRIOR_TESTS)
            path *= rate
            emitted += path
            if emitted > best_rate * self._costs.cost(k):
                best, best_rate = k, emitted / self._costs.cost(k)
        return best
