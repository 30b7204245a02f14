"""Typical acceptance is lossy, says so, and still never emits an impossible token."""

from __future__ import annotations

import math

import torch
from toy_decoder import exact_probabilities, outcome_index, table_model, toy_decode

from selfspec.sampling import Sampling, build_transforms
from selfspec.sampling.acceptance.typical import Typical, accept_typical, threshold
from selfspec.sampling.exact_device import distinct, replay_chain
from selfspec.sampling.exact_rules import play_typical
from selfspec.sampling.games import GAMES


def test_threshold_is_epsilon_when_sure_and_falls_with_entropy() -> None:
    sure = torch.tensor([1.0, 0.0, 0.0])
    assert float(threshold(sure)) == math.inf or math.isclose(float(threshold(sure)), 0.09, rel_tol=1e-6)
    uniform = torch.full((100,), 0.01)
    assert math.isclose(float(threshold(uniform)), 0.3 / 100, rel_tol=1e-5)


def test_draft_stands_only_strictly_above_the_threshold() -> None:
    p = torch.tensor([0.92, 0.05, 0.03])
    logits = p.log().expand(1, 2, 3)
    for x, count in ((0, 1), (1, 0)):
        verdict = accept_typical(torch.tensor([[x]]), torch.tensor([1]), logits, torch.tensor([0.5]))
        assert verdict.num_accepted_B.tolist() == [count]


def test_padding_is_never_accepted() -> None:
    logits = torch.tensor([[[9.0, 0.0], [9.0, 0.0]]])
    verdict = accept_typical(torch.tensor([[0]]), torch.tensor([0]), logits, torch.tensor([0.5]))
    assert verdict.num_accepted_B.tolist() == [0]


def test_device_code_replays_every_branch_of_the_exact_rule() -> None:
    for game in distinct(GAMES):
        rule = lambda x, q, n, logits, u, last: accept_typical(x, n, logits, last)  # noqa: E731
        assert replay_chain("typical", game, play_typical, rule).mismatches == []


def test_output_is_visibly_not_the_targets() -> None:
    """The other side of `lossy`: 20,000 requests miss the exact probabilities by more than 5% total variation."""
    V, n = 5, 20_000
    target, draft, transforms = table_model(V, 1), table_model(V, 2), build_transforms(Sampling(temperature=1.0))
    tokens = toy_decode(
        target, draft, transforms, Typical(), prompt=[0, 3], num_drafts=2, max_new_tokens=2, requests=torch.arange(n)
    )
    frequency = torch.bincount(outcome_index(tokens, V), minlength=V * V).double() / n
    expected = exact_probabilities(target, transforms, [0, 3], V, 2)
    assert float((frequency - expected).abs().sum() / 2) > 0.05
    assert frequency[expected == 0].sum() == 0
