"""Samples drawn through draft trees follow p: children without replacement under `rejection`, certain ones too.

False-alarm rate: the FAMILY tests together at most 1 in 1000 over the choice of seed (Bonferroni); seeds are fixed.
The faults that published tree verifiers have had are planted in `selfspec.sampling.certify`, which must find them.
"""

from __future__ import annotations

import itertools

import pytest
from chi_square import sequence_p_value
from tiny_game import exact_p, sample

from selfspec.sampling.acceptance import tree

TREES = {"wide": {"branches": [3, 2]}, "skew": {"paths": [[0], [1], [1, 0], [1, 1], [1, 1, 0]]}}
GRID = list(itertools.product(TREES, ("early_exit", "independent"), ("top_p", "top_k")))
FALSE_ALARM = 1e-3 / len(GRID)


@pytest.mark.parametrize("shape, drafter, case", GRID)
def test_samples_follow_p(shape, drafter, case):
    lookahead = {"kind": "tree", **TREES[shape]}
    tokens, outputs = sample(drafter, case, 2048, acceptance="rejection", lookahead=lookahead)
    assert sequence_p_value(tokens, exact_p(drafter, case)) > FALSE_ALARM
    assert not any(output.lossy for output in outputs)


def test_forgetting_what_was_rejected_is_seen(monkeypatch):
    """Negative control: after a rejection the next sibling is tested against p as it was."""
    monkeypatch.setattr(tree, "residual", lambda p_BV, q_BV: p_BV)
    tokens, _ = sample("early_exit", "top_p", 2048, acceptance="rejection", lookahead={"kind": "tree", "branches": [3]})
    assert sequence_p_value(tokens, exact_p("early_exit", "top_p")) < FALSE_ALARM
