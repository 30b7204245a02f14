"""The cost table's numbers, worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from selfspec.measure.costs import costs, draft_step_bytes, stack_of
from selfspec.records import PromptRecord, RoundRecord

# 4 layers of 1,000 bytes, a head of 1,600; keys and values of a token: 2 * 1 * 4 * 2 = 16 bytes a layer
TARGET = SimpleNamespace(
    head_bytes=1_600,
    dtype=torch.bfloat16,
    num_layers=4,
    step_bytes=4_000 + 1_600,
    layer_shapes=[SimpleNamespace(num_kv_heads=1, head_dim=4)] * 4,
)


class Draft:
    def __init__(self, name, own=0, **more):
        self.name, self.own = name, own
        self.__dict__.update(more)

    def draft_bytes(self, num_rows, capacity):
        return self.own, 0


def record(method, rounds):
    num_tokens = sum(entry.num_emitted for entry in rounds)
    ids, times = list(range(num_tokens)), (0, 0, 1, 1)
    return PromptRecord("p", "chat", method, 0, 10 - num_tokens // 2, ids, "", "length", False, *times, rounds=rounds)


AR_ROUNDS = [RoundRecord(0, 0, 1, 0.0, 0.018, 0.002)] * 4  # 20 ms a token
DRAFTED = [RoundRecord(2, 2, 3, 0.010, 0.025, 0.005), RoundRecord(2, 0, 1, 0.010, 0.025, 0.005)]  # 20 ms a token too


def test_bytes_of_the_stack_and_of_each_kind_of_draft():
    stack = stack_of(TARGET)
    assert (stack.num_layers, stack.layer_bytes, stack.head_bytes, stack.kv_bytes) == (4, 1000, 1600, 16)
    expected = {
        "ngram": (Draft("ngram"), 0),
        "early_exit": (Draft("early_exit", exit_layer=3), 3 * (1000 + 10 * 16) + 1600),
        "early_exit, reduced": (Draft("early_exit", own=200, exit_layer=3), 3 * (1000 + 10 * 16) + 200),
        "exit_adapter": (Draft("exit_adapter", own=700, exit_layer=1), 1160 + 700),
        "eagle3": (Draft("eagle3", own=900), 900 + 160),
        "medusa": (Draft("medusa", own=900), 300),
    }
    for name, (draft, read) in expected.items():
        assert draft_step_bytes(draft, TARGET, 10, 3) == read, name
    assert draft_step_bytes(Draft("new"), TARGET, 10, 3) is None


def test_costs_speedups_and_shares_by_hand():
    found = costs(
        [record("ar", AR_ROUNDS), record("exit", DRAFTED), record("hf_generate", [])],
        {"exit": Draft("early_exit", exit_layer=2)},
        TARGET,
        bytes_per_s=1e6,
    )
    assert found["context"] == 10 and found["step_bytes"] == 4 * 1160 + 1600
    assert found["ar_s_per_token"] == pytest.approx(0.02)
    assert found["bandwidth_share"] == pytest.approx(6240 / 0.02 / 1e6)
    assert found["limit_tokens_per_s"] == pytest.approx(1e6 / 6240)
    assert list(found["methods"]) == ["ar", "exit"] and found["methods"]["ar"]["c_measured"] is None
    own = found["methods"]["exit"]
    assert (own["num_drafted"], own["tau"]) == (2, 2)
    assert own["c_measured"] == pytest.approx(0.005 / 0.02) and own["v_measured"] == pytest.approx(1.25)
    assert own["speedup_simple"] == pytest.approx(1.0)
    assert own["c_predicted"] == pytest.approx((2 * 1160 + 1600) / 6240)
    assert own["speedup_model"] == pytest.approx(2 / (2 * own["c_predicted"] + 1))
    assert 1 + own["break_even_alpha"] + own["break_even_alpha"] ** 2 == pytest.approx(2 * 0.25 + 1.25)
