"""LayerSkip's schedules (Elhoushi et al. 2024, arXiv 2404.16710, section 4.1): what is dropped, and which exits count.

Layers are numbered l = 0..L−1 as in the paper; exit layer E (layers run) is the state that leaves layer l = E−1. All of
it is a function of the step (and, for what is drawn, of the seed and the sample), so a resumed run repeats it.

    layer dropout   x_{l+1} = x_l + M(p) f_l(x_l),   p_{l,t} = S(t) D(l) p_max,   D(l) = e^{l ln2 / (L−1)} − 1
                    S = 1 for a trained model, S(t) = e^{t ln2 / (T−1)} − 1 from scratch; M drawn per sample and layer
    exit loss       J = Σ_l ẽ(t, l) CE(g(x_{l+1}), Y),   ẽ(t, l) = C(t, l) e(l) / Σ_i C(t, i) e(i)
                    e(l) = s Σ_{i≤l} i,   e(L−1) = L − 1 + s Σ_{i≤L−2} i    (s: e_scale)
    curriculum C    rotational: every R-th exit, one further at each step;
                    gradual: the last one, and one more below it every T / 2L steps

Exits may also be a part of the layers: the curricula then run over the list of them, the last layer being its end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

CURRICULA = ("rotational", "gradual", "all")
SCALES = ("published", "uniform")


def dropout_rates(num_layers: int, max_rate: float, time_scale: float = 1.0) -> list[float]:
    """p_{l,t} by layer: 0 for the first, `max_rate` · S(t) for the last."""
    if num_layers == 1:
        return [0.0]
    growth = math.log(2) / (num_layers - 1)
    return [time_scale * max_rate * math.expm1(layer * growth) for layer in range(num_layers)]


def time_scale(step: int, steps: int) -> float:
    """S(t) of training from scratch: 0 at the first step, 1 at the last."""
    return math.expm1(step * math.log(2) / (steps - 1)) if steps > 1 else 1.0


def dropped(seed: int, step: int, sample: int, rates: Sequence[float]) -> np.ndarray:
    """Bool by layer: which ones this sample skips in this step, whatever batch or process it lies in."""
    draws = np.random.Generator(np.random.Philox(key=[seed, step], counter=[0, 0, 0, sample])).random(len(rates))
    return draws < np.asarray(rates)


def exits_on(curriculum: str, num_exits: int, step: int, steps: int, rotation: int) -> list[bool]:
    """C(t, ·) over a list of exits in ascending order: which have a loss at this step."""
    if curriculum == "rotational":
        return [(place - step) % rotation == 0 for place in range(num_exits)]
    if curriculum == "gradual":
        num_on = 1 + (2 * num_exits * step) // steps
        return [place >= num_exits - num_on for place in range(num_exits)]
    assert curriculum == "all"
    return [True] * num_exits


def exit_scales(num_layers: int, e_scale: float) -> list[float]:
    """e(l) as published: quadratic in l, and L − 1 more for the last layer."""
    scales = [e_scale * layer * (layer + 1) / 2 for layer in range(num_layers)]
    scales[-1] = num_layers - 1 + e_scale * (num_layers - 2) * (num_layers - 1) / 2
    return scales


def loss_weights(on: Iterable[bool], scales: Iterable[float]) -> list[float]:
    """ẽ(t, ·): the scales of the exits that are on, normalised over them. All zero: each counts the same (e(0) = 0)."""
    on = list(on)
    kept = [scale if is_on else 0.0 for is_on, scale in zip(on, scales, strict=True)]
    total = sum(kept)
    if total == 0:
        return [float(is_on) / max(1, sum(on)) for is_on in on]
    return [scale / total for scale in kept]
