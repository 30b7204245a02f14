"""The inverse-CDF draw: exact, and never a token of probability zero."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from selfspec.sampling.distribution import draw, probabilities

ALMOST_ONE = 1 - 2.0**-53
TINY = 2.0**-53


def test_lattice_of_uniforms_gives_every_token_exactly_its_share() -> None:
    """Weights in sixtieths against 60,000 midpoints: counts are exact, no tolerance."""
    sixtieths = torch.tensor([7, 0, 20, 3, 0, 30, 0])
    u = (torch.arange(60_000).double() + 0.5) / 60_000
    weights = (sixtieths.double() / 60).expand(60_000, 7)
    assert torch.bincount(draw(weights, u), minlength=7).tolist() == [1000 * n for n in sixtieths.tolist()]


def test_extreme_uniforms_never_give_a_token_of_weight_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    for V in (1, 2, 3, 1000, 49152):
        weights = torch.rand(64, V, generator=generator) * (torch.rand(64, V, generator=generator) < 0.1)
        weights[:, V // 2] += 1e-30
        for u in (TINY, 0.5, ALMOST_ONE):
            token = draw(weights, torch.full((64,), u, dtype=torch.float64))
            assert (weights.gather(1, token[:, None]) > 0).all()


def test_weights_need_not_be_normalised_and_their_scale_does_not_matter() -> None:
    weights = torch.rand(100, 50)
    u = torch.rand(100, dtype=torch.float64)
    for scale in (2.0**-100, 2.0**60):
        assert torch.equal(draw(weights * scale, u), draw(weights, u))


def test_zero_tokens_in_front_and_behind_do_not_move_the_draw() -> None:
    weights, u = torch.rand(100, 50), torch.rand(100, dtype=torch.float64)
    assert torch.equal(draw(torch.nn.functional.pad(weights, (3, 0)), u), draw(weights, u) + 3)


def test_rare_token_at_the_end_of_a_large_vocabulary_keeps_its_probability() -> None:
    """In a float32 running sum its 1e-7 would be lost: the last interval must be that wide, to 1e-3 of itself."""
    V = 49152
    weights = torch.full((1, V), 1.0 / V)
    weights[0, -1] = 1e-7
    edge = float(weights[0, :-1].double().sum() / weights.double().sum())
    width = 1 - edge
    for u, token in ((edge - 1e-3 * width, V - 2), (edge + 1e-3 * width, V - 1)):
        assert int(draw(weights, torch.tensor([u], dtype=torch.float64))) == token
    float32_sum = np.cumsum(weights.numpy()[0], dtype=np.float32)
    assert abs(float32_sum[-1] - float32_sum[-2] - 1e-7) > 1e-8, "negative control: a float32 running sum misses it"


@pytest.mark.parametrize("scale", [1.0, 1e-300, 2e-308, 1e300])
def test_a_weight_of_zero_never_comes_out_however_small_the_others_are(scale: float) -> None:
    weights = torch.tensor([[1.0, 0.0, 3.0]], dtype=torch.float64).expand(1000, -1) * scale
    u = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    assert torch.bincount(draw(weights, u), minlength=3).tolist() == [250, 0, 750]


def test_bad_rows_give_nan_and_some_valid_index() -> None:
    logits = torch.tensor([[0.0, torch.nan], [0.0, torch.inf], [-torch.inf, -torch.inf]])
    p = probabilities(logits)
    assert p.isnan().all()
    assert ((draw(p, torch.full((3,), 0.5)) >= 0) & (draw(p, torch.full((3,), 0.5)) < 2)).all()
    assert int(draw(torch.zeros(1, 4), torch.tensor([0.5]))) in range(4)


def test_probabilities_of_half_precision_logits_are_computed_in_float32() -> None:
    logits = torch.randn(2, 100).bfloat16()
    assert torch.equal(probabilities(logits), logits.float().softmax(-1))
