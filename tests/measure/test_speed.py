"""The speed table: every part of it is there on a tiny target, and no limit says what arithmetic does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from selfspec import load_target
from selfspec.measure.speed import pass_limit, product_rate

ROOT = Path(__file__).parents[2]


def test_a_pass_is_limited_by_bytes_until_operations_take_longer():
    target = load_target("random-tiny", "float32", "cpu")
    weights = sum(p.numel() for p in target.hf_model.parameters() if p.dim() == 2)
    weights -= 0 if target.tied else target.vocab_size * target.width  # rows of the embedding are looked up
    by_bytes = pass_limit(target, 1, bandwidth=1e9, rate=1e12)
    assert by_bytes == pytest.approx(target.step_bytes / 1e9) == pass_limit(target, 16, bandwidth=1e9, rate=1e12)
    assert pass_limit(target, 16, bandwidth=1e12, rate=1e9) == pytest.approx(2 * weights * 16 / 1e9)
    assert product_rate(torch.device("cpu"), torch.float32, size=64) > 0


def test_the_table_is_written_with_its_command_and_its_limits(tmp_path):
    command = [sys.executable, "experiments/speed.py", "target=random-tiny", f"out={tmp_path}", "repeats=1"]
    command += ["max_new_tokens=4", "prompt_tokens=8", "widths=[1,2]", "dtypes=[float32]"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600, capture_output=True)
    result = json.loads((tmp_path / "speed.json").read_text())
    assert all(set(costs) == {"1", "2"} for costs in result["layouts"].values()) and "plain" in result["layouts"]
    assert set(result["pass_limit_s"]["float32"]) == set(result["verify"]["float32"]) == {"1", "2"}
    text = (tmp_path / "speed.md").read_text()
    assert text.startswith("`python experiments/speed.py target=random-tiny") and "GFLOP/s in float32" in text
    assert "| width, weights alone |" in text
    assert "| verify width | float32 ms | × one token | limit ms |" in text
