"""The dtype that is faster here is chosen by the clock, said, and kept with the run; why does not change its name."""

from __future__ import annotations

import pytest
import torch

from selfspec.config import CompareConfig, config_hash, validate
from selfspec.errors import UserError
from selfspec.run import settle_runtime
from selfspec.target import fastest, load_target
from selfspec.target.packed import packing_available

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

    monkeypatch.setattr(fastest.time, "perf_counter", lambda: ticks["at"])
    monkeypatch.setattr(fastest, "_a_round", timed)
    monkeypatch.setattr(fastest, "_a_product", timed)
    monkeypatch.setattr(fastest, "packing_available", lambda dtype, device: True)
    fastest._measured_passes.cache_clear()
    fastest.fastest_product.cache_clear()
    yield seconds
    fastest._measured_passes.cache_clear()
    fastest.fastest_product.cache_clear()


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
    assert "0.50 of float32's time" in str(chosen.runtime.dtype_reason) and given.runtime.dtype_reason is None
    assert "runtime.dtype=fastest is bfloat16" in capsys.readouterr().err


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
