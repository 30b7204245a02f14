"""LayerSkip's formulas against numbers worked out by hand, and the curricula against what the paper says of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from selfspec.training.layerskip_schedule import (
    dropout_rates,
    dropped,
    exit_scales,
    exits_on,
    loss_weights,
    time_scale,
)


def test_dropout_grows_exponentially_from_none_to_the_highest_rate():
    # L = 5: D(l) = 2^(l/4) − 1
    assert dropout_rates(5, 0.2) == pytest.approx([0, 0.2 * 0.189207, 0.2 * 0.414214, 0.2 * 0.681793, 0.2], abs=1e-6)
    assert dropout_rates(5, 0.2, time_scale=0.5)[-1] == pytest.approx(0.1)
    assert dropout_rates(1, 0.2) == [0.0]


def test_time_scale_from_scratch_runs_from_none_to_all():
    assert [time_scale(t, 3) for t in range(3)] == pytest.approx([0, math.sqrt(2) - 1, 1])


def test_the_last_layer_has_a_bonus_and_the_first_no_scale_of_its_own():
    # e(l) = s·(0 + 1 + ... + l);  e(4) = 4 + s·(0 + 1 + 2 + 3)
    assert exit_scales(5, 1.0) == [0, 1, 3, 6, 4 + 6]
    assert exit_scales(5, 0.5) == [0, 0.5, 1.5, 3, 4 + 3]
    assert exit_scales(5, 0.0) == [0, 0, 0, 0, 4]


def test_weights_are_normalised_over_the_exits_that_are_on():
    weights = loss_weights([False, True, False, True, True], exit_scales(5, 1.0))
    assert weights == pytest.approx([0, 1 / 17, 0, 6 / 17, 10 / 17])
    assert loss_weights([True, False, False, False, False], exit_scales(5, 1.0)) == [1, 0, 0, 0, 0]  # e(0) = 0


def test_rotation_visits_every_exit_once_in_every_r_steps():
    num_exits, rotation = 30, 4
    for begin in (0, 7):
        counts = np.sum([exits_on("rotational", num_exits, begin + i, 100, rotation) for i in range(rotation)], axis=0)
        assert counts.tolist() == [1] * num_exits
    per_step = [sum(exits_on("rotational", num_exits, step, 100, rotation)) for step in range(20)]
    assert max(per_step) == math.ceil(num_exits / rotation)
    first, second = (exits_on("rotational", 8, step, 100, 4) for step in (0, 1))
    assert [i for i, on in enumerate(first) if on] == [0, 4] and [i for i, on in enumerate(second) if on] == [1, 5]


def test_gradual_adds_one_exit_below_the_last_every_t_over_2l_steps():
    steps, num_exits = 80, 4  # one more every 10 steps, all from step 30 on
    on = [exits_on("gradual", num_exits, step, steps, 1) for step in range(steps)]
    assert on[0] == on[9] == [False, False, False, True]
    assert on[10] == on[19] == [False, False, True, True]
    assert on[29] == [False, True, True, True] and on[30] == on[79] == [True] * 4


def test_what_is_dropped_depends_on_step_and_sample_and_on_nothing_else():
    rates = [0.0, 0.5, 1.0]
    first = dropped(0, 3, 11, rates)
    assert first.tolist() == dropped(0, 3, 11, rates).tolist() and not first[0] and first[2]
    draws = {tuple(dropped(0, step, sample, [0.5] * 16)) for step in range(8) for sample in range(8)}
    assert len(draws) == 64


def test_layers_are_dropped_as_often_as_their_rate_says():
    """4,000 draws a layer: four standard deviations either way, a false alarm in 1 of 2,000 for all eight layers."""
    rates = dropout_rates(8, 0.4)
    shares = np.mean([dropped(1, step, sample, rates) for step in range(200) for sample in range(20)], axis=0)
    for share, rate in zip(shares, rates, strict=True):
        assert abs(share - rate) <= 4 * math.sqrt(rate * (1 - rate) / 4000)
