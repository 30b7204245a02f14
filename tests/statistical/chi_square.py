"""Pearson's χ² of sampled sequences against their exact distribution, one p-value per sample.

The sequence of n tokens is tested n times: its first token, its first two jointly, and so on, so that a fault that
shows only in how later tokens depend on earlier ones is found. The smallest of the n p-values, times n (Bonferroni),
is reported. Outcomes expected fewer than `MIN_EXPECTED` times are pooled, smallest first, so that the χ² distribution
holds; an outcome that is impossible under p and yet occurred gives 0 at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

MIN_EXPECTED = 10.0

Tokens = tuple[int, ...]


def sequence_p_value(samples: Sequence[Tokens], exact: Mapping[Tokens, np.ndarray], eos: int | None = None) -> float:
    """p-value of `samples` under the conditional distributions `exact[prefix]` `[V]`; `eos` ends a sequence."""
    depth = 1 + max(len(prefix) for prefix in exact)
    smallest = min(p_value([s[:n] for s in samples], joint(exact, n, eos)) for n in range(1, depth + 1))
    return min(1.0, depth * smallest)


def joint(exact: Mapping[Tokens, np.ndarray], depth: int, eos: int | None = None) -> dict[Tokens, float]:
    """Probability of every sequence of `depth` tokens, or fewer when the last one is `eos`."""
    probability: dict[Tokens, float] = {(): 1.0}
    for _ in range(depth):
        longer: dict[Tokens, float] = {}
        for prefix, mass in probability.items():
            if prefix and prefix[-1] == eos:
                longer[prefix] = mass
            elif mass > 0:
                longer |= {(*prefix, token): mass * float(q) for token, q in enumerate(exact[prefix])}
        probability = longer
    return probability


def p_value(outcomes: Sequence[Tokens], probability: Mapping[Tokens, float]) -> float:
    """χ² p-value of the outcomes, cells with a small expectation pooled."""
    counts = Counter(outcomes)
    if any(probability.get(outcome, 0.0) == 0 for outcome in counts):
        return 0.0
    cells, observed, expected = [], 0, 0.0
    for outcome in sorted(probability, key=probability.__getitem__):
        observed += counts[outcome]
        expected += probability[outcome] * len(outcomes)
        if expected >= MIN_EXPECTED:
            cells.append((observed, expected))
            observed, expected = 0, 0.0
    cells[-1] = (cells[-1][0] + observed, cells[-1][1] + expected)  # what is left over joins the largest
    if len(cells) == 1:
        return 1.0
    statistic = sum((observed - expected) ** 2 / expected for observed, expected in cells)
    return float(stats.chi2.sf(statistic, len(cells) - 1))
