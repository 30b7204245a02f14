"""Draft as many tokens as bring the most tokens per second, by what rounds have cost and how often drafts have stood.

    rate(K) = (1 + Σ_{k<=K} Π_{i<=k} a_i) / T(K)

a_i is the running share of drafts at position i that were accepted when those before them were; T(K) the running time
of a round with K drafts, whatever it is made of (draft, verify, management, and on a GPU the graph). K = 0 is a
candidate like any other: a draft that does not pay is not made. Nothing has to be told beforehand:

- each K starts with a few trial rounds (the largest first: they show all positions' acceptance), as far as they can
  win: a K whose rate could not reach the best known even if all its drafts stood is not tried;
- times are medians of the last rounds, so that one slow round does not count; untried K are interpolated;
- acceptance forgets with a half-life, so the policy follows the text;
- while K is small, a longer round is tried now and then, ever more rarely while it does not help.

Cost: some arithmetic on the host per round. The choice depends on clocks, so the rounds differ from run to run; the
output's distribution does not.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from selfspec.errors import UserError
from selfspec.lookahead.confidence import check_max_drafted
from selfspec.lookahead.plan import Plan, RoundOutcome

TRIALS = 3  # rounds of a K before it is judged by its own times
TIMES_KEPT = 32
PRIOR_TESTS, PRIOR_RATE = (
    4.0,
    0.5,
)  # every position starts with so many tests like the position before, the first at 0.5


@dataclass
class ExpectedGain:
    """max_drafted: the largest K. half_life: tested drafts after which an observation counts half. probe_every: rounds
    between two longer trial rounds, at first; doubled while they bring nothing, up to 8 times where nothing is drafted.
    """

    max_drafted: int = 8
    half_life: float = 200.0
    probe_every: int = 32
    _accepted: list[float] = field(init=False, repr=False)
    _tested: list[float] = field(init=False, repr=False)
    _times_s: list[deque[float]] = field(init=False, repr=False)
    _since_probe: int = field(init=False, repr=False, default=0)
    _patience: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_max_drafted(self.max_drafted)
        for name in ("half_life", "probe_every"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name}={getattr(self, name)!r} is not possible: allowed is a number above 0.")
        self._tested = [0.0] * self.max_drafted
        self._accepted = [0.0] * self.max_drafted
        self._times_s = [deque(maxlen=TIMES_KEPT) for _ in range(self.max_drafted + 1)]
        self._patience = self.probe_every

    def choose(self) -> Plan:
        if (trial := self._next_trial()) is not None:
            return Plan(trial)
        best = self.best()
        self._since_probe += 1
        if self._since_probe >= self._patience:
            self._since_probe = 0
            self._patience = min(2 * self._patience, (8 if best == 0 else 2) * self.probe_every)
            return Plan(min(best + 1 if best else max(1, self.max_drafted // 4), self.max_drafted))
        return Plan(best)

    def observe(self, outcome: RoundOutcome) -> None:
        before = self.best() if self._times_s[0] else None
        self._times_s[outcome.plan.num_drafted].append(outcome.round_s)
        keep = 0.5 ** (1 / self.half_life)
        for drafted, accepted in zip(outcome.num_drafted, outcome.num_accepted, strict=True):
            if drafted == 0:
                continue
            for position in range(self.max_drafted):  # what is not tested any more is forgotten as well
                tested = position < min(accepted + 1, drafted)
                self._tested[position] = keep * self._tested[position] + tested
                self._accepted[position] = keep * self._accepted[position] + (position < accepted)
        if before is not None and self.best() != before:
            self._patience = self.probe_every  # something moved: look around again

    def best(self) -> int:
        """K of the highest expected rate."""
        return max(range(self.max_drafted + 1), key=self.rate)

    def rate(self, num_drafted: int) -> float:
        """Expected tokens per second and row of rounds with K drafts; 0 before anything was measured."""
        time_s = self.round_s(num_drafted)
        return self.expected_emitted(num_drafted) / time_s if time_s else 0.0

    def expected_emitted(self, num_drafted: int) -> float:
        """1 + Σ_k Π_{i<=k} a_i. The less a position was tested, the more it is taken to be like the one before it."""
        emitted, path, rate = 1.0, 1.0, PRIOR_RATE
        for accepted, tested in zip(self._accepted[:num_drafted], self._tested[:num_drafted], strict=True):
            rate = (accepted + PRIOR_TESTS * rate) / (tested + PRIOR_TESTS)
            path *= rate
            emitted += path
        return emitted

    def round_s(self, num_drafted: int) -> float | None:
        """Median time of a round with K drafts, or a line through the nearest measured ones; None without any."""
        measured = [k for k, times in enumerate(self._times_s) if times]
        if not measured:
            return None
        if num_drafted in measured:
            return statistics.median(self._times_s[num_drafted])
        below = [k for k in measured if k < num_drafted][-2:]
        above = [k for k in measured if k > num_drafted][:2]
        a, b = (below[-1], above[0]) if below and above else ((below or above)[0], (below or above)[-1])
        a_s, b_s = (statistics.median(self._times_s[k]) for k in (a, b))
        return a_s if a == b else max(a_s + (b_s - a_s) * (num_drafted - a) / (b - a), 1e-9)

    def _next_trial(self) -> int | None:
        """The K to be measured next: the largest, none at all, then those between that may yet win."""
        for candidate in (self.max_drafted, 0):
            if len(self._times_s[candidate]) < TRIALS:
                return candidate
        best_rate = self.rate(self.best())
        for candidate in range(1, self.max_drafted):
            if len(self._times_s[candidate]) < TRIALS:
                time_s = self.round_s(candidate)
                assert time_s is not None
                if self.expected_emitted(candidate) / time_s > 0.9 * best_rate:
                    return candidate
        return None
