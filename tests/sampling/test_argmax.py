"""The blockwise argmax is `torch.argmax`: ties, NaN, all -inf, any length and dtype."""

from __future__ import annotations

import pytest
import torch

from selfspec.sampling.argmax import BLOCK, SMALL, best_few, first_argmax


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("vocab_size", [7, SMALL, SMALL + 1, 10 * BLOCK + 17, 49152])
def test_it_is_torch_argmax(vocab_size, dtype):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 5, vocab_size, generator=generator).to(dtype)  # bfloat16 has ties aplenty
    scores[0, 1] = -torch.inf
    scores[0, 2, vocab_size - 1] = scores[0, 2, 3] = 50.0
    scores[0, 3, vocab_size // 2] = torch.nan
    scores[1, 0] = scores[1, 0].round()
    scores[1, 1, vocab_size - 1] = torch.inf
    assert torch.equal(first_argmax(scores), scores.argmax(-1))
    assert torch.equal(first_argmax(scores[0, 2]), torch.tensor(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [7, SMALL + 1, 10 * BLOCK + 17, 49152])
def test_the_best_few_are_those_of_torch_topk(vocab_size, dtype):
    scores = torch.randn(2, 4, vocab_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    scores[0, 1] = -torch.inf
    scores[0, 2, :5] = 50.0  # all of them in one block
    scores[1, 0, 3:] = -torch.inf
    values, indices = best_few(scores, 5)
    assert torch.equal(values, scores.topk(5).values)
    assert torch.equal(scores.gather(-1, indices), values)
    assert all(len(set(found)) == 5 for found in indices[1, 1:].tolist()), "no entry twice"


def test_where_there_are_too_few_the_rest_is_impossible():
    values, indices = best_few(torch.tensor([[0.5, 2.0, -torch.inf]]), 5)
    assert values.tolist() == [[2.0, 0.5, *[-torch.inf] * 3]]
    assert indices[0, :2].tolist() == [1, 0] and indices.amax() < 3
