"""The predictions for machines not at hand, against numbers worked out by hand and shapes counted on real modules."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from selfspec.config import RandomShape, TargetConfig, conf_dir, conf_names, load_conf, typed
from selfspec.errors import UserError
from selfspec.measure.cost_model import llama_stack, step_s
from selfspec.measure.plan import DraftPlan, alpha_at, fits, predict
from selfspec.measure.roofline import Hardware, Machine, link_s, memory_bytes, pass_s, touched_experts
from selfspec.target.shape import ModelShape, shape_of, shape_of_model
from tiny_models import TINY, tiny_model

ROUND = Hardware(
    "round", 1e9, bytes_per_s=1e9, flops_per_s={"float16": 1e12}, link_bytes_per_s=1e9, link_latency_s=1e-3
)
FULL = {"dtype": "float16", "bandwidth_share": 1.0, "compute_share": 1.0}
MODEL = ModelShape(10, 100, 4, 2, 25, 1000, layer_params=100_000, head_params=100_000, tied=True)


def test_one_step_reads_weights_and_cache_once():
    """2 bytes * (10 * 100,000 + 100,000) = 2.2 MB; a token's keys and values: 2 * 2 * 2 * 25 = 200 bytes a layer."""
    machine = Machine(ROUND, **FULL)
    assert pass_s(MODEL, machine, rows=1, context=0) == pytest.approx(2.2e-3)
    assert pass_s(MODEL, machine, rows=3, context=50) == pytest.approx(2.2e-3 + 3 * 50 * 200 * 10 / 1e9)
    assert pass_s(MODEL, machine, 1, 0, num_layers=4, head_share=0.5) == pytest.approx(2 * (4e5 + 0.5e5) / 1e9)
    assert pass_s(MODEL, Machine(ROUND, **{**FULL, "bandwidth_share": 0.5}), 1, 0) == pytest.approx(4.4e-3)


def test_wide_passes_are_bound_by_arithmetic():
    """2 * 2000 tokens * 1.1 M parameters = 4.4 GFLOP = 4.4 ms, above the 2.2 ms of reading."""
    assert pass_s(MODEL, Machine(ROUND, **FULL), rows=1, context=0, width=2000) == pytest.approx(4.4e-3)


def test_two_devices_halve_the_work_and_pay_two_all_reduces_a_layer():
    machine = Machine(ROUND, 2, **FULL)
    over_link = 20 * (1e-3 + 2 * 0.5 * (1 * 100 * 2) / 1e9)
    assert link_s(MODEL, machine, tokens=1, layers=10) == pytest.approx(over_link)
    assert pass_s(MODEL, machine, 1, 0) == pytest.approx(1.1e-3 + over_link)
    kv_heads_copied = Machine(ROUND, 4, **FULL)  # 2 heads on 4 devices: each is held twice
    cache = 1000 * 10 * (2 * 2 * 4 * 25)
    assert memory_bytes(MODEL, kv_heads_copied, 1, 1000) == pytest.approx((2 * 1.1e6 + cache) / 4)


def test_experts_that_a_pass_touches():
    moe = ModelShape(1, 8, 1, 1, 8, 10, 0.0, 0.0, expert_params=800.0, num_experts=8, experts_per_token=2)
    assert touched_experts(moe, 1) == pytest.approx(2)
    assert touched_experts(moe, 2) == pytest.approx(8 * (1 - 0.75**2))
    one, five = (pass_s(moe, Machine(ROUND, **FULL), 1, 0, width) for width in (1, 5))
    assert five / one == pytest.approx((1 - 0.75**5) / 0.25)  # verification is not free


def test_it_agrees_with_the_cost_model_of_one_device():
    shape = RandomShape(256, 512, 6, 8, 4, 32, 1000, 4096, True)
    model = shape_of(TargetConfig(kind="random", shape=shape))
    by_bytes = step_s(llama_stack(shape).step_bytes(300), 1e9)
    assert pass_s(model, Machine(ROUND, **FULL), 1, 300) == pytest.approx(
        by_bytes, rel=2e-3
    )  # norms are the difference


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2", "falcon", "gemma2"])
def test_the_shape_is_what_the_modules_hold(family):
    model = tiny_model(family)
    shape = shape_of_model(model)
    held = sum(parameter.numel() for name, parameter in model.named_parameters() if ".norm." not in name)
    counted = shape.num_layers * (shape.layer_params + shape.expert_params)
    assert 0.5 * held < counted + shape.head_params <= held
    assert (shape.num_experts, shape.experts_per_token) == ((6, 2) if family == "qwen3_moe" else (0, 0))
    assert len(TINY) > 5


# ---- which draft pays


def test_a_free_draft_gains_tau_and_a_costly_one_nothing():
    """ngram on a machine that is bound by reading: S = tau; K as long as allowed while every token is free."""
    machine = Machine(ROUND, **FULL)
    free = predict("copy", DraftPlan("ngram", 0.5), MODEL, machine, 1, 0, most=3)
    assert (free.num_drafted, free.speedup) == (3, pytest.approx(1 + 0.5 + 0.25 + 0.125))
    assert free.tokens_per_s == pytest.approx(free.speedup / 2.2e-3)
    whole = predict("exit", DraftPlan("early_exit", 0.5, shares=[0.9]), MODEL, machine, 1, 0)
    assert whole.exit_layer == 9 and whole.speedup < 1 and whole.break_even > 0.5


def test_the_best_exit_weighs_its_cost_against_its_alpha():
    """Exit 2 costs (2 + 1)/11 with alpha .6, exit 5 (5 + 1)/11 with .9; one draft each, by hand."""
    machine = Machine(ROUND, **FULL)
    draft = DraftPlan("early_exit", [[0.2, 0.6], [0.5, 0.9]])
    best = predict("exit", draft, MODEL, machine, 1, 0, most=1)
    by_hand = {2: 1.6 / (3 / 11 + 1), 5: 1.9 / (6 / 11 + 1)}
    assert best.exit_layer == max(by_hand, key=by_hand.__getitem__)
    assert best.speedup == pytest.approx(by_hand[best.exit_layer], rel=1e-6)


def test_assumptions_are_checked_and_interpolated():
    assert alpha_at("x", [[0.2, 0.4], [0.6, 0.8]], 0.4) == pytest.approx(0.6)
    assert alpha_at("x", [[0.2, 0.4]], 0.9) == 0.4
    for alpha, message in (
        (1.2, "a probability"),
        ("high", "give a number"),
        ([0.5], "give a number"),
        ([["a", "b"]], "give a number"),
        (["ab"], "give a number"),
        (float("nan"), "a probability"),
    ):
        with pytest.raises(UserError, match=message):
            alpha_at("x", alpha, 0.5)
    with pytest.raises(UserError, match="Allowed: early_exit, head"):
        predict("x", DraftPlan("eagle", 0.5), MODEL, Machine(ROUND, **FULL), 1, 0)
    with pytest.raises(UserError, match="allowed is 1 to 1000"):
        predict("x", DraftPlan("head", 0.5, d_vocab=2000), MODEL, Machine(ROUND, **FULL), 1, 0)
    with pytest.raises(UserError, match="no rate for round. Allowed: float16"):
        Machine(ROUND, dtype="bfloat16")


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("independent", {"size": 0.0}, "size=0.0 is not possible: a part of the target, above 0"),
        ("independent", {"size": -3.0}, "size=-3.0 is not possible"),
        ("early_exit", {"shares": [-1.0, 7.0]}, "parts of the layers lie between 0 and 1"),
    ],
)
def test_a_draft_that_costs_nothing_or_less_is_refused(kind: str, changes: dict, message: str):
    with pytest.raises(UserError, match=message):
        predict("x", DraftPlan(kind, 0.5, **changes), MODEL, Machine(ROUND, **FULL), 1, 0)


@pytest.mark.parametrize("name", ["memory_bytes", "bytes_per_s", "link_bytes_per_s", "link_latency_s"])
def test_hardware_that_cannot_be_is_refused(name: str):
    with pytest.raises(UserError, match=f"hardware.{name}=-1 is not possible"):
        Machine(replace(ROUND, **{name: -1}), **FULL)
    with pytest.raises(UserError, match="flops_per_s.float16=0 is not possible"):
        Machine(replace(ROUND, flops_per_s={"float16": 0}), **FULL)


def test_every_hardware_file_is_complete_and_a_model_too_large_is_said_not_to_fit():
    names = conf_names("hardware")
    assert {"a100", "h100", "h200", "cpu2"} <= set(names)
    for name in names:
        hardware = Hardware(**OmegaConf.to_container(load_conf("hardware", name)))
        machine = Machine(hardware)
        large = ModelShape(80, 8192, 64, 8, 128, 128256, layer_params=8.56e8, head_params=1.05e9)  # 70 B
        assert fits(MODEL, machine, 1, 2048) and not fits(large, machine, 1, 2048)
    assert fits(large, Machine(Hardware(**OmegaConf.to_container(load_conf("hardware", "h200"))), 2), 1, 2048)


def test_the_command_predicts_from_a_folder_without_weights(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "model"
    tiny_model("qwen3").config.save_pretrained(folder)
    monkeypatch.syspath_prepend(str(conf_dir().parent / "experiments"))
    plan = importlib.import_module("plan")
    overrides = [
        "target=hf",
        f"target.path={folder}",
        "hardware=a100",
        "devices=[1,2]",
        "rows=[1]",
        f"out={tmp_path}/plans",
    ]
    overrides += ["drafts.early_exit.d_vocab=50", "drafts.eagle_head.d_vocab=50"]
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        plan.show_plan(typed(plan.PlanConfig, compose("plan", overrides)))
        with pytest.raises(UserError, match="cannot write to .* choose another place with out="):
            plan.show_plan(typed(plan.PlanConfig, compose("plan", [*overrides, f"out={folder}/config.json"])))
    assert "2 x A100" in capsys.readouterr().out
    text = (tmp_path / "plans" / "plan.md").read_text()
    assert text.startswith("Predicted for") and "PREDICTED from shapes" in text and "2 x A100" in text
    found = json.loads((tmp_path / "plans" / "plan.json").read_text())
    assert [plan["devices"] for plan in found["plans"]] == [1, 2] and len(found["plans"][0]["predicted"]) == 5
