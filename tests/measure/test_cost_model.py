"""The cost model against published shapes, against enumeration, and at its edges."""

from __future__ import annotations

import itertools

import pytest

from selfspec.config import RandomShape
from selfspec.errors import UserError
from selfspec.measure.cost_model import (
    best_lookahead,
    break_even_alpha,
    expected_tau,
    llama_stack,
    round_cost,
    speedup,
    step_s,
)

BANDWIDTH = 4.3e12  # H200, bytes/s
CONTEXT = 1024


def shape(hidden, inner, layers, heads, kv_heads, head_dim, vocab):
    return RandomShape(hidden, inner, layers, heads, kv_heads, head_dim, vocab)


# layer MB, head MB, total GB, KV in KB per token, limit in tokens/s at 1k and 8k, all in bfloat16
MODELS = {
    "Qwen2.5-0.5B": (shape(896, 4864, 24, 14, 2, 64, 151936), 29.8, 272, 0.99, 12, 4298, 3950),
    "Llama-3.2-1B": (shape(2048, 8192, 16, 32, 8, 64, 128256), 121.6, 525, 2.47, 33, 1717, 1569),
    "Qwen3-1.7B": (shape(2048, 6144, 28, 16, 8, 128, 151936), 100.7, 622, 3.44, 115, 1208, 982),
    "Gemma-2-2B": (shape(2304, 9216, 26, 8, 4, 256, 256000), 155.7, 1180, 5.23, 106, 806, 705),
    "Llama-3.1-8B": (shape(4096, 14336, 32, 32, 8, 128, 128256), 436.2, 1051, 15.0, 131, 284, 267),
    "Qwen3-8B": (shape(4096, 12288, 36, 32, 8, 128, 151936), 385.9, 1245, 15.1, 147, 281, 263),
}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_bytes_and_limits_of_known_models(name):
    model, layer_mb, head_mb, total_gb, kv_kb, limit_1k, limit_8k = MODELS[name]
    stack = llama_stack(model)
    assert stack.layer_bytes / 1e6 == pytest.approx(layer_mb, abs=0.05)
    assert stack.head_bytes / 1e6 == pytest.approx(head_mb, abs=0.5)
    assert stack.step_bytes(0) / 1e9 == pytest.approx(total_gb, rel=5e-3)
    assert stack.kv_bytes * stack.num_layers / 1e3 == pytest.approx(kv_kb, abs=0.5)
    assert 1 / step_s(stack.step_bytes(1024), BANDWIDTH) == pytest.approx(limit_1k, abs=1)
    assert 1 / step_s(stack.step_bytes(8192), BANDWIDTH) == pytest.approx(limit_8k, abs=1)


# exit layer: c and the best speedup at alpha = .6 .7 .8 .9, with the full head and with one of 32,768 rows
TABLE = {
    ("Llama-3.2-1B", 2): ((0.31, 1.22, 1.35, 1.53, 1.84), (0.15, 1.50, 1.74, 2.09, 2.76)),
    ("Llama-3.2-1B", 4): ((0.41, 1.14, 1.21, 1.34, 1.56), (0.25, 1.30, 1.46, 1.68, 2.08)),
    ("Llama-3.2-1B", 8): ((0.61, 1.00, 1.06, 1.12, 1.23), (0.45, 1.10, 1.17, 1.29, 1.47)),
    ("Llama-3.1-8B", 2): ((0.13, 1.57, 1.84, 2.25, 3.03), (0.08, 1.77, 2.13, 2.72, 3.91)),
    ("Llama-3.1-8B", 4): ((0.19, 1.43, 1.63, 1.93, 2.48), (0.13, 1.55, 1.81, 2.21, 2.96)),
    ("Llama-3.1-8B", 8): ((0.30, 1.23, 1.37, 1.55, 1.87), (0.25, 1.31, 1.46, 1.69, 2.08)),
    ("Llama-3.1-8B", 16): ((0.54, 1.04, 1.11, 1.18, 1.32), (0.48, 1.08, 1.15, 1.24, 1.40)),
}


@pytest.mark.parametrize(("name", "exit_layer"), sorted(TABLE))
def test_costs_and_speedups_of_early_exits(name, exit_layer):
    model = MODELS[name][0]
    for head_rows, row in zip((model.vocab_size, 32768), TABLE[name, exit_layer], strict=True):
        c = llama_stack(model).draft_cost(CONTEXT, exit_layer, head_rows / model.vocab_size)
        assert c == pytest.approx(row[0], abs=0.006)
        for alpha, expected in zip((0.6, 0.7, 0.8, 0.9), row[1:], strict=True):
            assert best_lookahead(alpha, c)[1] == pytest.approx(expected, abs=0.011)


def enumerated_tau(acceptance):
    """Every way in which a round can go, with its probability."""
    total = 0.0
    for outcome in itertools.product((True, False), repeat=len(acceptance)):
        probability = 1.0
        for accepted, chance in zip(outcome, acceptance, strict=True):
            probability *= chance if accepted else 1 - chance
        emitted = 1 + len(list(itertools.takewhile(bool, outcome)))
        total += probability * emitted
    return total


@pytest.mark.parametrize("acceptance", [[], [0.3], [0.9, 0.1, 0.5], [1.0, 0.0, 1.0], [0.7] * 8, [1.0] * 5, [0.0] * 3])
def test_tau_is_the_mean_over_all_outcomes(acceptance):
    assert expected_tau(acceptance) == pytest.approx(enumerated_tau(acceptance), abs=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 0.99])
def test_tau_of_a_constant_chance_is_the_geometric_sum(alpha):
    for num_drafted in (0, 1, 4, 9):
        assert expected_tau([alpha] * num_drafted) == pytest.approx((1 - alpha ** (num_drafted + 1)) / (1 - alpha))


def test_drafting_nothing_is_autoregressive_decoding():
    assert speedup([], c=0.7) == 1.0


@pytest.mark.parametrize("v", [1.0, 1.2])
@pytest.mark.parametrize("c", [0.02, 0.2, 0.5])
@pytest.mark.parametrize("num_drafted", [1, 3, 8])
def test_break_even_is_where_the_speedup_is_one(num_drafted, c, v):
    alpha = break_even_alpha(num_drafted, c, v)
    assert alpha is not None
    assert speedup([alpha] * num_drafted, c, v) == pytest.approx(1.0, abs=1e-9)
    assert speedup([min(1.0, alpha + 0.01)] * num_drafted, c, v) > 1 > speedup([alpha - 0.01] * num_drafted, c, v)


def test_one_draft_pays_from_alpha_equal_to_its_cost():
    assert break_even_alpha(1, 0.37) == pytest.approx(0.37)


def test_drafts_that_cost_more_than_they_can_bring_never_pay():
    assert break_even_alpha(2, c=1.1) is None
    assert break_even_alpha(1, c=0.5, v=2.0) is None


@pytest.mark.parametrize(("alpha", "c", "v"), [(0.6, 0.3, 1.0), (0.9, 0.05, 1.3), (0.2, 0.9, 1.0)])
def test_the_best_lookahead_is_better_than_all_others(alpha, c, v):
    best, value = best_lookahead(alpha, c, v, most=12)
    others = {k: sum(alpha**i for i in range(k + 1)) / round_cost(k, c, v) for k in range(1, 13)}
    assert value == pytest.approx(max(others.values())) and others[best] == pytest.approx(value)


def test_impossible_numbers_are_refused():
    with pytest.raises(UserError, match=r"acceptance=1\.2"):
        expected_tau([0.5, 1.2])
    with pytest.raises(UserError, match="num_drafted=0"):
        break_even_alpha(0, 0.5)
