"""Greedy acceptance: the output is the target's argmax chain, whatever is drafted."""

from __future__ import annotations

import itertools

import pytest
import torch
from toy_decoder import table_model, toy_decode

from selfspec.sampling import NoiseKey, Sampling, build_rule, build_transforms
from selfspec.sampling.acceptance.greedy import Greedy, accept_greedy
from selfspec.sampling.argmax import BLOCK, SMALL, first_argmax

V = 6
KEY = NoiseKey(0, torch.tensor([0]), torch.tensor([0]))


def test_accepts_the_longest_matching_prefix_then_corrects() -> None:
    chosen = [2, 0, 5, 1]
    logits_BTV = torch.nn.functional.one_hot(torch.tensor([chosen]), V).float()
    for drafted in itertools.product((0, 2, 5), repeat=3):
        verdict = accept_greedy(torch.tensor([drafted]), torch.tensor([3]), logits_BTV)
        expected = next((k for k in range(3) if drafted[k] != chosen[k]), 3)
        assert verdict.num_accepted_B.tolist() == [expected]
        assert verdict.next_token_B.tolist() == [chosen[expected]]
        assert verdict.error_B.tolist() == [0]


def test_padding_is_never_accepted_even_if_it_matches() -> None:
    logits_BTV = torch.nn.functional.one_hot(torch.tensor([[0, 0, 0], [0, 0, 0], [0, 0, 0]]), V).float()
    verdict = accept_greedy(torch.zeros(3, 2, dtype=torch.int64), torch.tensor([0, 1, 2]), logits_BTV)
    assert verdict.num_accepted_B.tolist() == [0, 1, 2]


def test_without_drafts_it_is_an_autoregressive_step() -> None:
    logits_BTV = torch.randn(2, 1, V)
    verdict = accept_greedy(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), logits_BTV)
    assert torch.equal(verdict.next_token_B, logits_BTV[:, 0].argmax(-1))
    assert verdict.num_accepted_B.tolist() == [0, 0]


def test_ties_go_to_the_smallest_id_as_in_generate() -> None:
    logits_BTV = torch.zeros(1, 1, V).bfloat16()
    verdict = accept_greedy(torch.zeros(1, 0, dtype=torch.int64), torch.tensor([0]), logits_BTV)
    assert verdict.next_token_B.tolist() == [0]
    assert Greedy().draw(logits_BTV[:, 0], KEY)[0].tolist() == [0]


def test_greedy_output_does_not_depend_on_drafter_or_draft_length() -> None:
    target = table_model(V, seed=1)
    sampling = Sampling(repetition_penalty=1.3, no_repeat_ngram_size=3)
    transforms, rule = build_transforms(sampling), build_rule("auto", sampling)
    settings = dict(prompt=[1, 2, 3], max_new_tokens=20, requests=torch.tensor([0]))
    alone = toy_decode(target, None, transforms, rule, num_drafts=0, **settings)
    for K in (1, 2, 3, 8):
        for draft in (target, table_model(V, seed=2), lambda tokens, index: -target(tokens, index)):
            assert torch.equal(toy_decode(target, draft, transforms, rule, num_drafts=K, **settings), alone)


def test_a_drafter_equal_to_the_target_accepts_everything() -> None:
    target, transforms, rule = table_model(V, seed=1), build_transforms(Sampling()), Greedy()
    tokens = toy_decode(
        target, None, transforms, rule, prompt=[1, 2], num_drafts=0, max_new_tokens=5, requests=torch.tensor([0])
    )
    context = torch.cat([torch.tensor([[1, 2]]), tokens], dim=1)
    logits_BTV = torch.stack([target(context, torch.tensor([1 + t])) for t in range(5)], dim=1)
    verdict = rule.accept(tokens[:, :4], None, torch.tensor([4]), logits_BTV, KEY)
    assert verdict.num_accepted_B.tolist() == [4]
    assert torch.equal(verdict.next_token_B, tokens[:, 4])


@pytest.mark.parametrize("vocab_size", [5, SMALL - 1, SMALL, SMALL + 1, SMALL + BLOCK, 49152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blockwise_argmax_is_argmax_with_ties_nan_and_empty_rows(vocab_size: int, dtype: torch.dtype) -> None:
    scores = torch.randn(7, 3, vocab_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    scores[0] = scores[0].round()  # many ties
    scores[1] = -torch.inf
    scores[2, :, vocab_size // 2 :] = torch.nan
    scores[3, :, -1] = torch.inf
    scores[4] = 0
    assert torch.equal(first_argmax(scores), scores.argmax(-1))
