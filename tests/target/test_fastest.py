"""The dtype that is faster here is chosen by the clock, said, and kept with the run; why does not change its name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra import compose, initialize_config_dir

from selfspec.config import CompareConfig, conf_dir, config_hash, validate
from selfspec.errors import UserError
from selfspec.measure.concurrency import ConcurrencyConfig
from selfspec.measure.concurrency import config_hash as concurrency_hash
from selfspec.run import run_compare, settle_runtime
from selfspec.target import fastest, load_target
from selfspec.target.packed import packing_available
from selfspec.training.config import settled_dtype
from selfspec.tuning.costs import costs_file

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch):
    """Every run of a dtype takes what `seconds` says."""
    seconds = {torch.float32: 1.0, torch.bfloat16: 1.0}
    ticks = {"at": 0.0}

    def timed(dtype: torch.dtype):
        def run() -> None:
            ticks["at"] += seconds[dtype]

        return run

    monkeypatch.setattr(fastest, "time", SimpleNamespace(perf_counter=lambda: ticks["at"]))
    monkeypatch.setattr(fastest, "_a_round", timed)
    monkeypatch.setattr(fastest, "_a_product", timed)
    monkeypatch.setattr(fastest, "packing_available", lambda dtype, device: True)
    monkeypatch.setattr(fastest, "_made", {})
    fastest._measured_passes.cache_clear()
    fastest._measured_products.cache_clear()
    yield seconds
    fastest._measured_passes.cache_clear()
    fastest._measured_products.cache_clear()


@pytest.mark.parametrize(("half", "chosen"), [(0.5, torch.bfloat16), (0.95, torch.float32), (6.0, torch.float32)])
@pytest.mark.parametrize("asked", [fastest.fastest_dtype, fastest.fastest_product])
def test_bfloat16_is_chosen_where_it_is_clearly_faster(clock, asked, half, chosen):
    clock[torch.bfloat16] = half
    choice = asked(CPU)
    assert choice.dtype == chosen and f"{half:.2f} of float32's time" in choice.reason
    clock[torch.bfloat16] = 1 / half
    assert asked(CPU) == choice, "asked again in one process, the answer is the same"


def test_float32_without_timing_where_bfloat16_cannot_be_packed(monkeypatch):
    monkeypatch.setattr(fastest, "packing_available", lambda dtype, device: dtype != torch.bfloat16)
    monkeypatch.setattr(fastest, "_measured_passes", None)
    assert fastest.fastest_dtype(CPU).dtype == torch.float32


def test_a_run_is_named_by_the_dtype_and_says_why(clock, capsys):
    clock[torch.bfloat16] = 0.5
    chosen, given = CompareConfig(), CompareConfig()
    chosen.runtime.device = given.runtime.device = "cpu"
    chosen.runtime.dtype, given.runtime.dtype = "fastest", "bfloat16"
    for config in (chosen, given):
        settle_runtime(config)
    assert chosen.runtime.dtype == "bfloat16" and config_hash(chosen) == config_hash(given)
    assert capsys.readouterr().err.count("runtime.dtype=fastest is bfloat16") == 1
    assert "0.50 of float32's time" in fastest.choices_made()["decoding"]


def test_a_run_keeps_why(clock, tmp_path):
    """In the provenance of compare.py, whose dtype alone would not tell."""
    clock[torch.bfloat16] = 6.0
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        arguments = ["experiment=smoke_tiny", "runtime=fastest", "runtime.device=cpu", f"output_dir={tmp_path}"]
        run_compare(compose("compare", arguments))
    (path,) = tmp_path.rglob("provenance.json")
    assert "6.00 of float32's time" in json.loads(path.read_text())["dtype_choices"]["decoding"]


def test_what_was_measured_about_it_is_in_no_hash(clock):
    """The ratio differs from one start to the next; a run, its tuning costs and its concurrency cells stay the same."""
    hashes = []
    for half in (0.5, 0.4):
        clock[torch.bfloat16] = half
        fastest._measured_passes.cache_clear()
        serving, tuning = ConcurrencyConfig(), CompareConfig()
        for config in (serving, tuning):
            config.runtime.device, config.runtime.dtype = "cpu", "fastest"
            settle_runtime(config)
        hashes.append((concurrency_hash(serving), costs_file(Path(), tuning, "f", [], []), config_hash(tuning)))
    assert hashes[0] == hashes[1]


def test_training_takes_the_first_process_choice_and_says_it_once(clock, capsys):
    clock[torch.bfloat16] = 6.0
    runtime = CompareConfig().runtime
    runtime.device, runtime.dtype = "cpu", "fastest"
    assert settled_dtype(runtime) == "float32" and "fastest is float32" in capsys.readouterr().err
    other = SimpleNamespace(first=False, decided_by_first=lambda decision, device: True)
    assert settled_dtype(runtime, other) == "bfloat16" and capsys.readouterr().err == ""
    runtime.dtype = "float64"
    assert settled_dtype(runtime) == "float64"


def test_what_this_machine_chooses_is_what_is_loaded():
    choice = fastest.fastest_dtype(CPU)
    assert load_target("random-tiny", "fastest", "cpu").dtype == choice.dtype
    assert packing_available(choice.dtype, CPU) or choice.dtype == torch.float32


def test_ranks_do_not_choose_each_for_itself():
    config = CompareConfig()
    config.target.kind = "random"
    config.runtime.dtype, config.runtime.tensor_parallel = "fastest", 2
    with pytest.raises(UserError, match="Give float32 or bfloat16"):
        validate(config)
    with pytest.raises(UserError, match="Give 'float32' or 'bfloat16'"):
        load_target("random-tiny", "fastest", "cpu", tensor_parallel=2)
