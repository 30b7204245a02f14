"""Measured ranks foretell the rounds of a real tree, and the tree chosen from them is the one of the highest rate."""

from __future__ import annotations

import pytest
import torch
from tree_drafters import DRAFTERS, TARGET, drafter_of

from selfspec import UserError, build_drafter, decode
from selfspec.lookahead.tree_choice import best_tree, cost_at
from selfspec.lookahead.tree_shape import best_shape, shape_of_branches, shape_of_paths
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


ACCURACIES = [[0.45, 0.2, 0.1], [0.5, 0.15, 0.05], [0.6, 0.2, 0.1]]


@pytest.mark.parametrize(
    ("verify_cost", "draft_cost"),
    [({1: 1.0, 16: 1.1}, 0.05), ({1: 1.0, 4: 1.2, 16: 3.0}, 0.1), ({1: 10.0, 8: 40.0}, 3.0)],
)
def test_the_chosen_tree_has_the_highest_rate_of_all_sizes_and_depths(verify_cost, draft_cost):
    chosen = best_tree(ACCURACIES, verify_cost, draft_cost)
    rates = []
    for depth in (1, 2, 3):
        for num_nodes in range(2, max(verify_cost) + 1):
            shape, accepted = best_shape(ACCURACIES[:depth], num_nodes)
            cost = cost_at(verify_cost, shape.num_nodes) + shape.depth * draft_cost
            rates.append((1 + accepted) / cost * verify_cost[1])
    assert chosen.speedup == pytest.approx(max(rates))
    assert shape_of_paths(chosen.paths) == chosen.shape
    assert chosen.speedup == pytest.approx(chosen.expected_emitted / chosen.round_cost * verify_cost[1])


def test_where_positions_are_free_the_tree_is_large_and_where_they_cost_it_is_a_short_chain():
    free = best_tree(ACCURACIES, {1: 1.0, 16: 1.0}, 0.01)
    dear = best_tree(ACCURACIES, {1: 1.0, 2: 1.3, 16: 16.0}, 0.1)
    assert free.num_nodes == 16 and free.depth == 3 and free.top_k == 4  # four nodes of its second level have children
    assert dear.paths == [[0]]
    at_once = best_tree(ACCURACIES, {1: 1.0, 16: 1.0}, [0.5, 0.0, 0.0])
    assert at_once.depth == 3, "heads that are read at once: deeper levels are free"
    assert cost_at({1: 1.0, 3: 2.0}, 2) == 1.5


@pytest.mark.parametrize(
    ("verify_cost", "draft_cost", "message"),
    [
        ({2: 1.0}, 0.1, "1 position among them"),
        ({1: 1.0, 2: 0.0}, 0.1, "costs above 0"),
        ({1: 1.0}, 0.1, "at most 1 nodes"),
        ({1: 1.0, 4: 1.0}, [0.1], "one for each"),
        ({1: 1.0, 4: 1.0}, -0.1, "0 or more"),
    ],
)
def test_impossible_costs_are_refused(verify_cost, draft_cost, message):
    with pytest.raises(UserError, match=message):
        best_tree(ACCURACIES, verify_cost, draft_cost)
