"""Measured ranks foretell the rounds of a real tree."""

from __future__ import annotations

import pytest
import torch
from tree_drafters import DRAFTERS, TARGET, drafter_of

from selfspec import UserError, build_drafter, decode
from selfspec.lookahead.tree_shape import shape_of_branches, shape_of_paths
from selfspec.measure.rank_accuracy import RankAccuracy, rank_accuracy
from tiny_models import prompt_ids

PROMPT = prompt_ids(9)
WIDE = shape_of_branches([16, 4])


def foretold(ranks, shape):
    """Accepted drafts of every round that begins where the last one ended."""
    at, accepted, paths = 0, [], set(shape.paths)
    while at < len(ranks):
        depth = 0
        while depth < shape.depth and at + depth < len(ranks) and tuple(ranks[at][: depth + 1]) in paths:
            depth += 1
        accepted.append(depth)
        at += depth + 1
    return accepted


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_ranks_foretell_every_round_of_a_real_tree(drafter):
    """Under a right parent, with the draft's own state as it is in a real round: else some round would differ."""
    options = dict(max_new_tokens=40, ignore_eos=True)
    measured = rank_accuracy(TARGET, drafter_of(drafter), [PROMPT], max_depth=2, **options)
    (output,) = decode(
        TARGET, drafter_of(drafter), [PROMPT], lookahead={"kind": "tree", "branches": [16, 4]}, **options
    )
    emitted = [min(a + 1, 40) for a in foretold(measured.ranks_ND.tolist(), WIDE)]
    assert [r.num_emitted for r in output.rounds][:-1] == emitted[:-1], "the last round is cut at the limit"
    assert sum(emitted[:-1]) > len(emitted) - 1, "nothing was ever accepted"


def test_counts_are_over_all_rows_and_end_with_the_text():
    prompts = [prompt_ids(length, seed=length) for length in (1, 9, 70)]
    drafter = drafter_of("independent_equal")
    measured = rank_accuracy(TARGET, drafter, prompts, max_depth=3, num_ranks=2, max_new_tokens=12, max_batch_rows=2,
                             ignore_eos=True)  # fmt: skip
    assert measured.tested == [36, 33, 30], "one position less of each text at every depth"
    assert measured.counts == [[36, 0], [33, 0], [30, 0]]
    assert measured.accuracies == [[1.0, 0.0]] * 3
    assert measured.expected_accepted(shape_of_paths([[0], [0, 0]])) == 2


def test_heads_end_the_depth_and_copies_have_no_ranks():
    assert rank_accuracy(TARGET, drafter_of("medusa"), [PROMPT], max_depth=9, max_new_tokens=6).ranks_ND.shape[1] == 4
    with pytest.raises(UserError, match="'ngram' ranks no candidates"):
        rank_accuracy(TARGET, build_drafter("ngram", TARGET), [PROMPT])
    with pytest.raises(UserError, match="Ranks need a prompt"):
        rank_accuracy(TARGET, drafter_of("medusa"), [])


def test_a_tree_is_counted_on_the_measured_paths():
    measured = RankAccuracy(torch.tensor([[0, 1], [1, 0], [0, 0], [2, 0], [0, -1]]), 3)
    assert measured.tested == [5, 4] and measured.counts == [[3, 1, 1], [3, 1, 0]]
    assert measured.expected_accepted(shape_of_paths([[0], [1], [0, 0], [0, 1]])) == (2 + 1 + 2 + 0) / 4
    with pytest.raises(UserError, match="depth 3 cannot be counted"):
        measured.expected_accepted(shape_of_paths([[0], [0, 0], [0, 0, 0]]))
