"""Samples drawn through draft trees follow p: children without replacement under `rejection`, and certain ones, which
dynamic trees have.

False-alarm rate: the FAMILY tests together at most 1 in 1000 over the choice of seed (Bonferroni); seeds are fixed.
The faults that published tree verifiers have had are planted in `selfspec.sampling.certify`, which must find them.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from chi_square import sequence_p_value
from tiny_game import exact_p, sample

from selfspec.sampling.acceptance import tree
from selfspec.sampling.acceptance.tree_rules import RejectionTree
from selfspec.sampling.distribution import probabilities

TREES = {
    "wide": {"kind": "tree", "branches": [3, 2]},
    "skew": {"kind": "tree", "paths": [[0], [1], [1, 0], [1, 1], [1, 1, 0]]},
    "dynamic": {"kind": "dynamic_tree", "depth": 3, "top_k": 2, "num_nodes": 6},
}
GRID = list(itertools.product(TREES, ("early_exit", "independent"), ("top_p", "top_k")))
FALSE_ALARM = 1e-3 / len(GRID)


@pytest.mark.parametrize("shape, drafter, case", GRID)
def test_samples_follow_p(shape, drafter, case):
    tokens, outputs = sample(drafter, case, 2048, acceptance="rejection", lookahead=TREES[shape])
    assert sequence_p_value(tokens, exact_p(drafter, case)) > FALSE_ALARM
    assert not any(output.lossy for output in outputs)


def test_forgetting_what_was_rejected_is_seen(monkeypatch):
    """Negative control: after a rejection the next sibling is tested against p as it was."""
    monkeypatch.setattr(tree, "take_away", lambda p_BV, q_BV, scale_B1: p_BV.sum(-1, keepdim=True))
    tokens, _ = sample("early_exit", "top_p", 2048, acceptance="rejection", lookahead={"kind": "tree", "branches": [3]})
    assert sequence_p_value(tokens, exact_p("early_exit", "top_p")) < FALSE_ALARM


def test_likely_candidates_tested_as_if_they_had_been_drawn_are_seen(monkeypatch):
    """Negative control for dynamic trees: the usual mistake of judging certain children by a q."""

    def as_drawn(self, tree_, logits_BNV, noise):
        p_BNV = probabilities(logits_BNV)
        return original(self, replace(tree_, q_BNV=torch.full_like(p_BNV, 1 / p_BNV.shape[-1])), logits_BNV, noise)

    original = RejectionTree.accept
    monkeypatch.setattr(RejectionTree, "accept", as_drawn)
    tokens, _ = sample("early_exit", "top_p", 2048, acceptance="rejection", lookahead=TREES["dynamic"])
    assert sequence_p_value(tokens, exact_p("early_exit", "top_p")) < FALSE_ALARM
