"""What a round with K drafts costs relative to other K, on a machine whose speed changes and whose clock is noisy.

A round's time is cost(K) times a level: seconds per unit of cost, which the machine's speed and the growing context
move for all K alike. The level follows every round. Costs are learned where K changes: the first rounds of a K are
compared with the level that the rounds of other K before them had. (Were they learned from all rounds, nothing would
tell a costlier K from a slower machine, and the two would drift apart while one K goes on.)

- Costs are medians of the last comparisons, so that one slow round does not count. A K's first round, which may have to
  build kernels, is not compared.
- A round never costs less than one with fewer drafts; K that were not measured lie on lines between those that were.
- What was compared little, or long ago, may be wrong: it is taken to be a little cheaper than it seems.

Cost: a median and a few dozen multiplications on the host per round.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median_low

import numpy as np

KEPT = 15  # comparisons per K
MEASURED = 2  # comparisons that make a cost known
COMPARED = 5  # rounds after a change of K that are compared with those before it
UNSURE = 0.15  # how much cheaper a K is taken to be that was never compared; less by 1 / sqrt(1 + 2 comparisons)
LEVEL_STEP = 0.1  # the share of a round's deviation that moves the level


class RoundCosts:
    """keep: what is left of a comparison's weight one round later."""

    def __init__(self, max_drafted: int, keep: float) -> None:
        self._keep = keep
        self._relative: list[deque[float]] = [deque(maxlen=KEPT) for _ in range(max_drafted + 1)]
        self._weight = [0.0] * (max_drafted + 1)
        self._cost = [1.0] * (max_drafted + 1)
        self._ran: set[int] = set()
        self._last, self._run_length = 0, 0
        self._level_s, self._before_s = 0.0, 0.0  # the level now, and when K changed last

    def known(self, num_drafted: int) -> bool:
        return len(self._relative[num_drafted]) >= MEASURED

    def cost(self, num_drafted: int) -> float:
        """In some unit, the same for all K. The one that goes on is what others are held against: as it seems."""
        doubt = 0.0 if num_drafted == self._last else UNSURE / math.sqrt(1 + 2 * self._weight[num_drafted])
        return self._cost[num_drafted] * (1 - doubt)

    def observe(self, num_drafted: int, round_s: float) -> None:
        self._weight = [self._keep * weight for weight in self._weight]
        first = num_drafted not in self._ran
        if num_drafted != self._last:
            self._before_s, self._run_length = self._level_s, 0
        self._run_length += 1
        self._last = num_drafted
        self._ran.add(num_drafted)
        if not first:
            self._compare(num_drafted, round_s)

    def _compare(self, num_drafted: int, round_s: float) -> None:
        if not self._level_s:
            self._level_s = self._before_s = round_s
        relative = self._relative[num_drafted]
        if self._run_length <= COMPARED or not self.known(num_drafted):
            relative.append(round_s / self._before_s)
            self._weight[num_drafted] += 1
            self._fit()
        if self.known(num_drafted):
            slower = round_s / (self._level_s * median_low(relative))
            self._level_s *= min(max(slower, 0.5), 2.0) ** LEVEL_STEP

    def _fit(self) -> None:
        known = [k for k in range(len(self._cost)) if self.known(k)]
        if known:
            medians = rising([median_low(self._relative[k]) for k in known], [1 + self._weight[k] for k in known])
            self._cost = np.interp(range(len(self._cost)), known, medians).tolist()


def rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest sequence that never falls (pool adjacent violators): those that do get their weighted mean."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, how many
    for value, weight in zip(values, weights, strict=True):
        block = (value, weight, 1)
        while blocks and blocks[-1][0] > block[0]:
            mean, heavier, count = blocks.pop()
            total = heavier + block[1]
            block = ((mean * heavier + block[0] * block[1]) / total, total, count + block[2])
        blocks.append(block)
    return [mean for mean, _, count in blocks for _ in range(count)]
