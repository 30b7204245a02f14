"""Prompt lookup copies what followed the most recent occurrence of the longest matching suffix."""

from __future__ import annotations

import random

import pytest
import torch

from selfspec import UserError, build_drafter, wrap_target
from selfspec.decoding.drafting import Drafting
from selfspec.decoding.rows import Rows
from selfspec.lookahead import Plan
from tiny_models import tiny_llama

TARGET = wrap_target(tiny_llama())


def reference(tokens, num_drafted, max_match, min_match, num_per_match=None):
    """The definition, as a loop."""
    for length in range(min(max_match, len(tokens) - 1), min_match - 1, -1):
        suffix = tokens[-length:]
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == suffix:
                most = num_drafted if num_per_match is None else min(num_drafted, int(num_per_match * length))
                return tokens[start + length :][:most]
    return []


@pytest.mark.parametrize("max_match, min_match", [(1, 1), (3, 1), (3, 2), (4, 4), (50, 2)])
@pytest.mark.parametrize("num_drafted", [1, 4, 9])
@pytest.mark.parametrize("num_per_match", [None, 1, 1.5, 2])
def test_drafts_are_those_of_the_definition(num_drafted, max_match, min_match, num_per_match):
    options = dict(max_match=max_match, min_match=min_match, num_per_match=num_per_match)
    drafter = build_drafter("ngram", TARGET, **options)
    rng = random.Random(0)
    found = 0
    for _ in range(60):
        contents = [[rng.randrange(4) for _ in range(rng.randrange(1, 40))] for _ in range(3)]
        rows = Rows(TARGET, 3, 64)
        for row, tokens in enumerate(contents):
            rows.place(row, tokens, 8, row)
        draft = drafter.propose(rows, Drafting(rows, Plan(num_drafted), None))
        for row, tokens in enumerate(contents):
            count = int(draft.num_drafted_B[row])
            expected = reference(tokens, num_drafted, **options)
            assert draft.tokens_BK[row, :count].tolist() == expected
            found += bool(expected)
    assert found > 5


def test_idle_rows_draft_nothing():
    rows = Rows(TARGET, 2, 64)
    rows.place(0, [5, 6, 5, 6, 5], 8, 0)
    draft = build_drafter("ngram", TARGET).propose(rows, Drafting(rows, Plan(3), None))
    assert draft.num_drafted_B.tolist() == [2, 0]  # 5 6 5 matches at 0, and 6 5 follow it


@torch.inference_mode()
def test_what_was_not_copied_is_not_verified_where_the_host_may_look():
    drafter = build_drafter("ngram", TARGET, num_per_match=1)
    rows = Rows(TARGET, 3, 64)
    for row, ids in enumerate(([5, 6, 7, 5, 6], [1, 2, 3, 4], [8, 9, 8])):
        rows.place(row, ids, 8, row)
    rows.pause(0)
    for may_look, width in ((False, 6), (True, 1)):  # row 2 copies one token; row 0, which would two, is idle
        draft = drafter.propose(rows, Drafting(rows, Plan(6), None, may_look=may_look))
        assert draft.tokens_BK.shape == (3, width) and draft.num_drafted_B.tolist() == [0, 0, 1]


def test_impossible_match_lengths_are_refused():
    for options in ({"max_match": 0}, {"max_match": 2, "min_match": 3}, {"min_match": 0}):
        with pytest.raises(UserError, match="1 <= min_match <= max_match"):
            build_drafter("ngram", TARGET, **options)
    for number in (0, 0.5, float("nan"), float("inf"), 1e20):
        with pytest.raises(UserError, match="num_per_match=.* is not possible"):
            build_drafter("ngram", TARGET, num_per_match=number)


def test_a_match_is_looked_up_as_far_as_the_row_goes_and_no_farther():
    """The comparison of every slot with the row's last tokens would be as wide as what was asked for."""
    rows = Rows(TARGET, 1, 64)
    rows.place(0, [5, 6, 7, 5, 6], 8, 0)
    draft = build_drafter("ngram", TARGET, max_match=10**10, num_per_match=1_000_000).copy(rows, 2)
    assert draft.tokens_BK.tolist() == [[7, 5]] and draft.num_drafted_B.tolist() == [2]


def test_the_buffer_behind_the_committed_tokens_is_never_copied_from():
    rows = Rows(TARGET, 1, 64)
    rows.place(0, [5, 6, 7], 8, 0)
    rows.tokens_BS[0, 3:] = torch.tensor([7, 7, 7] + [0] * (rows.tokens_BS.shape[1] - 6))
    assert build_drafter("ngram", TARGET).propose(rows, Drafting(rows, Plan(3), None)).num_drafted_B.tolist() == [0]
