"""How sure a ratio is: bootstrap intervals, a paired test, its smallest detectable effect, and Holm's correction.

Everything resamples *prompts*, not repeats or rounds: two measurements of one prompt are not two observations. Seeded,
so the same records give the same digits. For a handful of prompts a percentile interval is too narrow: in simulation
it covers the truth 86% of the time at 6 prompts, 89% at 8, 94% at 48. `minimum_detectable_speedup` says what a set of
prompts can show at all.
Cost: one [resamples, prompts] matrix, milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]
RESAMPLES = 10_000
CONFIDENCE = 0.95


def resample_counts(num_prompts: int, seed: int, resamples: int = RESAMPLES) -> Floats:
    """How often each prompt is drawn in each bootstrap sample: [resamples, num_prompts], rows sum to `num_prompts`."""
    rng = np.random.default_rng(seed)
    shares = np.full(num_prompts, 1.0 / num_prompts)
    return rng.multinomial(num_prompts, shares, size=resamples).astype(np.float64)


def percentile_interval(log_ratios_R: Floats, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The middle `confidence` of resampled log ratios, back on the ratio scale."""
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(log_ratios_R, [tail, 1.0 - tail])
    return math.exp(low), math.exp(high)


def sign_flip_p_value(log_ratios: Floats, seed: int, resamples: int = RESAMPLES) -> float:
    """Two-sided test that the paired log ratios are centred at zero, flipping the sign of each prompt's ratio.

    The +1 keeps the false-alarm rate at its nominal level for any number of resamples (Phipson and Smyth, 2010).
    """
    rng = np.random.default_rng(seed)
    signs = rng.integers(0, 2, size=(resamples, len(log_ratios))) * 2.0 - 1.0
    flipped = np.abs(signs @ log_ratios)
    observed = abs(float(log_ratios.sum()))
    return float((1 + np.count_nonzero(flipped >= observed * (1 - 1e-12))) / (1 + resamples))


def minimum_detectable_speedup(log_ratios: Floats, confidence: float = CONFIDENCE, power: float = 0.8) -> float | None:
    """The smallest true ratio above 1 these prompts would show with the given power: exp((t_a + t_b) s / sqrt n)."""
    num_prompts = len(log_ratios)
    if num_prompts < 2:
        return None
    quantiles = stats.t.ppf([0.5 + confidence / 2.0, power], df=num_prompts - 1)
    return float(math.exp(float(quantiles.sum()) * float(log_ratios.std(ddof=1)) / math.sqrt(num_prompts)))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Adjusted p-values for a family of comparisons (Holm, 1979): keeps the chance of any false alarm at its level."""
    ordered = sorted(p_values, key=lambda label: p_values[label])
    adjusted: dict[str, float] = {}
    running = 0.0
    for rank, label in enumerate(ordered):
        running = max(running, min(1.0, (len(ordered) - rank) * p_values[label]))
        adjusted[label] = running
    return {label: adjusted[label] for label in p_values}
