"""Coupled acceptance: sampled output equals autoregressive output token for token."""

from __future__ import annotations

import pytest
import torch
from toy_decoder import exact_probabilities, table_model, toy_decode

from selfspec.sampling import NoiseKey, Sampling, build_transforms
from selfspec.sampling.acceptance.coupled import Coupled
from selfspec.sampling.acceptance.rejection import Rejection

V, NEW = 7, 16
TARGET = table_model(V, seed=1)
SAMPLINGS = {
    "plain": Sampling(temperature=1.0),
    "top_p": Sampling(temperature=0.8, top_p=0.9),
    "penalties": Sampling(temperature=1.1, repetition_penalty=1.3, frequency_penalty=0.2, no_repeat_ngram_size=3),
}
DRAFTERS = {
    "the target": TARGET,
    "another model": table_model(V, seed=2),
    "always wrong": lambda tokens, index: -10 * TARGET(tokens, index),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_sampled_output_equals_autoregressive_for_any_drafter_length_batch_and_order(name: str, drafter: str) -> None:
    transforms = build_transforms(SAMPLINGS[name])
    requests = torch.tensor([11, 5, 7, 2, 13])
    settings = dict(prompt=[1, 2, 3], max_new_tokens=NEW, seed=3)
    alone = torch.cat(
        [toy_decode(TARGET, None, transforms, Coupled(), num_drafts=0, requests=r[None], **settings) for r in requests]
    )
    assert len({tuple(row) for row in alone.tolist()}) == 5, "different requests sample differently"
    for K in (1, 2, 5):
        together = toy_decode(
            TARGET, DRAFTERS[drafter], transforms, Coupled(), num_drafts=K, requests=requests, **settings
        )
        assert torch.equal(together, alone)
    order = torch.tensor([4, 2, 0, 3, 1])
    shuffled = toy_decode(
        TARGET, DRAFTERS[drafter], transforms, Coupled(), num_drafts=3, requests=requests[order],
        num_drafted_of=lambda lengths_B: lengths_B % 4, **settings,
    )  # fmt: skip
    assert torch.equal(shuffled, alone[order])


def test_rejection_does_not_have_this_property() -> None:
    """Negative control: the equality above is not an accident of the toy."""
    settings = dict(prompt=[1, 2, 3], max_new_tokens=NEW, seed=3, requests=torch.arange(20))
    transforms = build_transforms(SAMPLINGS["plain"])
    alone = toy_decode(TARGET, None, transforms, Rejection(), num_drafts=0, **settings)
    assert not torch.equal(
        toy_decode(TARGET, DRAFTERS["another model"], transforms, Rejection(), num_drafts=2, **settings), alone
    )


def test_a_drafter_equal_to_the_target_accepts_everything() -> None:
    requests, positions = torch.arange(50), torch.arange(50) + 9
    logits_BTV = torch.randn(50, 4, V, generator=torch.Generator().manual_seed(0))
    rule = Coupled()
    drafted = [rule.draw(logits_BTV[:, k], NoiseKey(0, requests, positions, step=k))[0] for k in range(3)]
    verdict = rule.accept(
        torch.stack(drafted, 1), None, torch.full((50,), 3), logits_BTV, NoiseKey(0, requests, positions)
    )
    assert verdict.num_accepted_B.eq(3).all()


def test_agreement_is_at_least_the_coupling_bound() -> None:
    """(1 - TV)/(1 + TV) for Gumbel coupling; 20,000 draws, 5 sigma below (false-alarm rate 3e-7)."""
    n = 20_000
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.3, 0.3, 0.4])
    key = NoiseKey(0, torch.arange(n), torch.zeros(n, dtype=torch.int64))
    rule = Coupled()
    agree = rule.draw(p.log().expand(n, 3), key)[0] == rule.draw(q.log().expand(n, 3), key)[0]
    distance = float((p - q).abs().sum() / 2)
    assert float(agree.double().mean()) > (1 - distance) / (1 + distance) - 5 * 0.5 / n**0.5
    other = NoiseKey(1, torch.arange(n), torch.zeros(n, dtype=torch.int64))
    independent = rule.draw(p.log().expand(n, 3), key)[0] == rule.draw(q.log().expand(n, 3), other)[0]
    assert float(independent.double().mean()) < (1 - distance) / (1 + distance) - 5 * 0.5 / n**0.5, "control"


def test_output_follows_the_target() -> None:
    """Largest deviation of 343 outcome frequencies, 30,000 requests: 6 sigma each (false-alarm rate below 1e-6)."""
    n, transforms = 30_000, build_transforms(SAMPLINGS["top_p"])
    tokens = toy_decode(
        TARGET, DRAFTERS["another model"], transforms, Coupled(), prompt=[1, 2, 3], num_drafts=2, max_new_tokens=3,
        requests=torch.arange(n),
    )  # fmt: skip
    p = exact_probabilities(TARGET, transforms, [1, 2, 3], V, 3)
    frequency = torch.bincount(tokens @ torch.tensor([49, 7, 1]), minlength=343).double() / n
    sigma = (p * (1 - p) / n).sqrt()
    assert ((frequency - p).abs() <= 6 * sigma + 10 / n).all()
    assert frequency[p == 0].sum() == 0
