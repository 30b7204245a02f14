"""Rounds with trees as graphs, on the CPU: which nodes a dynamic tree has is decided on the device, so one recording
serves every round.
"""

from __future__ import annotations

import pytest
from cases import RAGGED, RULES, drafters_for, target_on, the_rounds, told

from selfspec import Decoder

TARGET = target_on("cpu")
ALL = drafters_for(TARGET)
TREES = {
    "tree": {"kind": "tree", "branches": [3, 2]},
    "dynamic_tree": {"kind": "dynamic_tree", "depth": 3, "top_k": 3, "num_nodes": 8},
}


@pytest.mark.parametrize("rule", ["greedy", "rejection"])
@pytest.mark.parametrize("drafter", ["early_exit", "eagle3"])
@pytest.mark.parametrize("tree", sorted(TREES))
def test_recorded_rounds_with_trees_commit_the_tokens_of_eager_ones(tree, drafter, rule, tapes):
    options = dict(max_new_tokens=12, lookahead=TREES[tree], eos_token_ids=[5, 44], seed=11, **RULES[rule])
    eager = told(Decoder(TARGET, ALL[drafter], 3, rounds="eager").decode(RAGGED[:4], **options))
    decoder = Decoder(TARGET, ALL[drafter], 3, rounds="whole")
    assert told(decoder.decode(RAGGED[:4], **options)) == eager
    assert tapes and the_rounds(decoder).num_captures == 1
