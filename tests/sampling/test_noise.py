"""Noise is a pure function of its key: known answers, no dependence on the batch, and it looks random.

Every statistical test has a false-alarm rate below 1e-6 over all seeds (the seeds here are fixed, so it either always
passes or never), and a negative control that must fail.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from selfspec.sampling import gumbel, uniforms
from selfspec.sampling.noise import STREAM_DRAFT, STREAM_TREE, STREAM_VERIFY, _mix, _signed, splitmix64

ALPHA = 1e-6
GOLDEN_UNIFORMS = [[0.5982366137164409, 0.7902056036424555], [0.10745165046768113, 0.20182582359545875]]
GOLDEN_GUMBEL = [[[0.6513838171958923, 0.43440428376197815, -0.3190872073173523]]]
ZERO, ONE = torch.tensor([0]), torch.tensor([1])


def uniform_sample(n: int = 20_000) -> np.ndarray:
    return uniforms(0, torch.arange(n // 4), torch.arange(n // 4) % 7, STREAM_DRAFT, 4).flatten().numpy()


def test_hash_gives_the_published_splitmix64_outputs() -> None:
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert splitmix64(1234567) == 6457827717110365317
    for state in (0, 1, 1234567, 2**63, 2**64 - 1):
        z = torch.tensor([_signed((state + 0x9E3779B97F4A7C15) % 2**64)])
        assert int(_mix(z)) % 2**64 == splitmix64(state)


def test_golden_values_never_change() -> None:
    torch.testing.assert_close(
        uniforms(7, torch.tensor([0, 3]), torch.tensor([5, 5]), STREAM_VERIFY, 2),
        torch.tensor(GOLDEN_UNIFORMS, dtype=torch.float64), rtol=0, atol=0,
    )  # fmt: skip
    torch.testing.assert_close(
        gumbel(7, torch.tensor([3]), torch.tensor([[5]]), 3), torch.tensor(GOLDEN_GUMBEL), rtol=2e-6, atol=0
    )


def test_a_tensor_seed_gives_the_same_noise_as_a_number() -> None:
    for seed in (0, 1, 12345, 2**40 + 3):
        args = (torch.tensor([2, 9]), torch.tensor([4, 4]))
        assert torch.equal(uniforms(seed, *args, STREAM_DRAFT, 3), uniforms(torch.tensor(seed), *args, STREAM_DRAFT, 3))


def test_noise_does_not_depend_on_the_batch_or_the_place_in_it() -> None:
    requests, positions = torch.tensor([4, 8, 15, 16, 23]), torch.tensor([1, 2, 3, 5, 8])
    together = uniforms(1, requests, positions, STREAM_DRAFT, 3)
    order = torch.tensor([3, 0, 4, 1, 2])
    assert torch.equal(uniforms(1, requests[order], positions[order], STREAM_DRAFT, 3), together[order])
    for b in range(5):
        assert torch.equal(uniforms(1, requests[b : b + 1], positions[b : b + 1], STREAM_DRAFT, 3)[0], together[b])
    grid = gumbel(1, requests, positions[:, None] + torch.arange(4), 11)
    assert torch.equal(gumbel(1, requests[2:3], positions[2:3, None] + 2, 11)[0, 0], grid[2, 2])


def test_gumbel_of_a_token_does_not_depend_on_the_vocabulary_size() -> None:
    small, large = (gumbel(1, ONE, torch.tensor([[3]]), V) for V in (10, 1000))
    assert torch.equal(small[0, 0], large[0, 0, :10])


def test_first_index_continues_the_same_sequence() -> None:
    whole = uniforms(1, ONE, ONE, STREAM_DRAFT, 6)
    assert torch.equal(uniforms(1, ONE, ONE, STREAM_DRAFT, 2, first_index=4), whole[:, 4:])


@pytest.mark.parametrize("position", [0, 1, 2**31, 2**32 - 1])
def test_large_positions_and_requests_are_told_apart(position: int) -> None:
    values = {
        float(uniforms(seed, torch.tensor([request]), torch.tensor([position]), stream, 1))
        for seed in (0, 1, -1, 2**63)
        for request in (0, 1, 2**40)
        for stream in (STREAM_DRAFT, STREAM_VERIFY, STREAM_TREE)
    }
    assert len(values) == 36


def test_uniforms_lie_strictly_inside_the_unit_interval_and_pass_a_kolmogorov_test() -> None:
    sample = uniform_sample()
    assert sample.min() > 0
    assert sample.max() < 1
    assert stats.kstest(sample, "uniform").pvalue > ALPHA
    assert stats.kstest(sample**1.1, "uniform").pvalue < ALPHA, "negative control: a slightly bent sample must fail"


def neighbours() -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs of noise whose keys differ in one ingredient only."""
    n = 20_000
    r, p = torch.arange(n), torch.arange(n) // 3

    def u(seed: int, request: Tensor, position: Tensor, stream: int, index: int) -> Tensor:
        return uniforms(seed, request, position, stream, 1, index)[:, 0]

    base = u(0, r, p, STREAM_DRAFT, 0)
    return {
        "seed": (base, u(1, r, p, STREAM_DRAFT, 0)),
        "request": (base, u(0, r + n, p, STREAM_DRAFT, 0)),
        "next request": (base[:-1], base[1:]),
        "position": (base, u(0, r, p + 1, STREAM_DRAFT, 0)),
        "stream": (base, u(0, r, p, STREAM_VERIFY, 0)),
        "index": (base, u(0, r, p, STREAM_DRAFT, 1)),
        "token": tuple(torch.exp(-torch.exp(-gumbel(0, ZERO, ZERO[None], n + 1)[0, 0].double())).unfold(0, n, 1)),
    }


@pytest.mark.parametrize("name", ["seed", "request", "next request", "position", "stream", "index", "token"])
def test_noise_of_neighbouring_keys_is_independent(name: str) -> None:
    """chi2 on a 16 x 16 grid of pairs."""
    one, other = neighbours()[name]

    def pvalue(a: Tensor, b: Tensor) -> float:
        cells = (a * 16).long() * 16 + (b * 16).long()
        return float(stats.chisquare(torch.bincount(cells, minlength=256).numpy()).pvalue)

    assert pvalue(one, other) > ALPHA
    mixed = torch.where(torch.arange(len(one)) % 5 == 0, one, other)
    assert pvalue(one, mixed) < ALPHA, "negative control: pairs that agree one time in five must fail"


def test_gumbel_noise_has_the_gumbel_distribution_and_is_finite() -> None:
    sample = gumbel(0, torch.arange(10), torch.arange(20).expand(10, 20), 250).flatten()
    assert torch.isfinite(sample).all()
    assert stats.kstest(sample.double().numpy(), "gumbel_r").pvalue > ALPHA
    assert stats.kstest(1.05 * sample.double().numpy(), "gumbel_r").pvalue < ALPHA, "negative control"


def test_argmax_of_logits_and_gumbel_is_a_sample_of_softmax() -> None:
    """chi2 with 7 degrees of freedom, also for tokens of probability 1e-4."""
    logits = torch.tensor([0.0, -1.0, -2.0, -3.0, -5.0, -7.0, -9.0, -math.inf])
    n = 400_000
    drawn = (logits + gumbel(0, torch.arange(n), torch.zeros(n, 1, dtype=torch.int64), 8)[:, 0]).argmax(-1)
    counts = torch.bincount(drawn, minlength=8)
    assert counts[7] == 0
    expected = logits.double().softmax(-1) * n
    assert stats.chisquare(counts[:7].numpy(), expected[:7].numpy()).pvalue > ALPHA
    bent = (1.05 * logits[:7]).double().softmax(-1) * n
    assert stats.chisquare(counts[:7].numpy(), bent.numpy()).pvalue < ALPHA, "negative control"
