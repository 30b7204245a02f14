"""Processors of the caller: called as generate calls them, between the penalties and the warpers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from selfspec.errors import UserError
from selfspec.sampling import Prefix, Sampling, build_transforms

TOKENS = torch.tensor([[9, 1, 2, 3, 4], [5, 6, 7, 8, 0]])
PREFIX = Prefix(TOKENS, torch.tensor([[3, 4], [2, 3]]), starts_B=torch.tensor([1, 0]))


def test_processor_sees_each_positions_own_prefix_and_one_row_of_scores() -> None:
    calls: list[tuple[list[list[int]], tuple[int, ...]]] = []

    def spy(input_ids: Tensor, scores: Tensor) -> Tensor:
        calls.append((input_ids.tolist(), tuple(scores.shape)))
        return scores

    build_transforms(Sampling(), [spy])(torch.randn(2, 2, 6), PREFIX)
    assert calls == [([[1, 2]], (1, 6)), ([[1, 2, 3]], (1, 6)), ([[5, 6]], (1, 6)), ([[5, 6, 7]], (1, 6))]


def test_processors_run_behind_penalties_and_before_warpers() -> None:
    logits = torch.randn(2, 2, 12, generator=torch.Generator().manual_seed(0)) * 3
    ban_top = lambda input_ids, scores: scores.scatter(1, scores.argmax(-1, keepdim=True), -torch.inf)  # noqa: E731
    ours = build_transforms(Sampling(temperature=0.5, top_k=3, suppress_tokens=(1,)), [ban_top])(logits, PREFIX)
    scores = hf.SuppressTokensLogitsProcessor((1,))(None, logits.reshape(4, 12))
    scores = hf.TopKLogitsWarper(3)(None, hf.TemperatureLogitsWarper(0.5)(None, ban_top(None, scores)))
    assert torch.equal(ours.reshape(4, 12), scores)


def test_processors_of_transformers_work_unchanged() -> None:
    logits = torch.randn(2, 2, 12)
    processors = [hf.MinLengthLogitsProcessor(3, [0]), hf.RepetitionPenaltyLogitsProcessor(1.5)]
    ours = build_transforms(Sampling(), processors)(logits, PREFIX)
    for b, t, ids in [(0, 0, [1, 2]), (0, 1, [1, 2, 3]), (1, 0, [5, 6]), (1, 1, [5, 6, 7])]:
        scores = logits[b, t][None].clone()
        for processor in processors:
            scores = processor(torch.tensor([ids]), scores)
        assert torch.equal(ours[b, t], scores[0])


def test_processor_that_writes_in_place_changes_neither_logits_nor_tokens() -> None:
    def vandal(input_ids: Tensor, scores: Tensor) -> Tensor:
        input_ids.fill_(0)
        return scores.fill_(-1.0)

    logits = torch.randn(2, 2, 6)
    kept, tokens = logits.clone(), TOKENS.clone()
    ours = build_transforms(Sampling(), [vandal])(logits, PREFIX)
    assert torch.equal(logits, kept)
    assert torch.equal(tokens, TOKENS)
    assert (ours == -1).all()


@pytest.mark.parametrize("shape", [(1, 5), (6,), (2, 6)])
def test_processor_that_changes_the_shape_is_refused_with_row_and_position(shape: tuple[int, ...]) -> None:
    def grows(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores if input_ids.shape[1] < 3 else torch.zeros(shape)

    with pytest.raises(UserError, match=r"row 0, position 3: .* \(1, 6\)"):
        build_transforms(Sampling(), [grows])(torch.randn(2, 2, 6), PREFIX)


def test_processor_that_returns_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="NoneType"):
        build_transforms(Sampling(), [lambda input_ids, scores: None])(torch.randn(2, 2, 6), PREFIX)  # type: ignore[arg-type,return-value]


def test_padding_rows_are_not_shown_to_processors() -> None:
    calls = []
    prefix = Prefix(TOKENS, torch.tensor([[3, 0], [0, 0]]))
    build_transforms(Sampling(), [lambda ids, scores: calls.append(ids) or scores])(torch.randn(2, 2, 6), prefix)  # type: ignore[func-returns-value]
    assert len(calls) == 1
