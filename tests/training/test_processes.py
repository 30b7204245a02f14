"""Training in several processes gives what one process gives, and only the first of them writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from selfspec.errors import UserError
from selfspec.target import Target, load_target
from selfspec.training.checkpoints import STATE
from selfspec.training.job import train_draft
from selfspec.training.processes import Processes
from selfspec.training.trainer import TrainConfig

ROOT = Path(__file__).parent.parent.parent
DRAFT = dict(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1)
SETTINGS = dict(
    steps=6,
    batch_rows=2,
    row_tokens=48,
    learning_rate=1e-2,
    warmup_steps=1,
    accumulate=2,
    num_kept=8,
    log_every=1,
    validate_every=3,
    checkpoint_every=2,
)
CONFIG = TrainConfig(**SETTINGS, autocast=False)


def torchrun(count: int, model: Path, data: Path, out: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    draft = [f"+draft.{name}={value}" for name, value in DRAFT.items()]
    settings = [f"train.{name}={value}" for name, value in SETTINGS.items()]
    unlike_base = [
        "train.final_lr_share=0.02",
        "train.weight_decay=0.05",
        "train.clip_norm=1.0",
        "train.autocast=false",
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    command += [str(ROOT / "experiments" / "train.py"), "drafter=independent", "target=hf", f"target.path={model}"]
    command += ["runtime=cpu_float32", "runtime.num_threads=1", f"data={data}", f"out={out}"]
    command += [*draft, *settings, *unlike_base, *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, env=environment)


BEGIN = """
import torch
from selfspec.training.processes import joined
with joined("cpu") as processes:
    weights = [torch.full((3,), float(processes.rank + 1)), torch.full((2, 2), float(-processes.rank))]
    processes.begin_alike(weights)
    assert weights[0].tolist() == [1.0] * 3 and weights[1].tolist() == [[0.0] * 2] * 2, weights
"""


def test_all_begin_with_the_first_ones_weights(tmp_path: Path):
    (tmp_path / "begin.py").write_text(BEGIN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, str(tmp_path / "begin.py")], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def model_folder(chat_target: Target, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    chat_target.hf_model.save_pretrained(folder)
    chat_target.tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_two_processes_go_on_from_a_killed_run_of_one_and_end_with_its_weights(
    model_folder: Path, data_folder: Callable[..., Path], tmp_path: Path
):
    target = load_target(str(model_folder), dtype="float32", device="cpu", fused=False)
    target.name = "hf"
    data = data_folder()
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    train_draft(target, "independent", DRAFT, CONFIG, data, alone, "c")

    class Killed(BaseException):
        pass

    def dies(record: dict[str, Any]) -> None:
        if record.get("step") == 3:
            raise Killed

    with pytest.raises(Killed):
        train_draft(target, "independent", DRAFT, CONFIG, data, shared, "c", dies)
    assert (shared / STATE).exists()
    done = torchrun(2, model_folder, data, shared)
    assert done.returncode == 0, done.stderr
    facts = json.loads((shared / "training.json").read_text())
    assert facts["processes"] == 2 and facts["run_key"] == json.loads((alone / "training.json").read_text())["run_key"]
    weights = [load_file(folder / "model.safetensors") for folder in (alone, shared)]
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name])
    logs = [[json.loads(line) for line in (f / "log.jsonl").read_text().splitlines()] for f in (alone, shared)]
    assert [record["step"] for record in logs[0]] == [record["step"] for record in logs[1]]
    for ours, theirs in zip(*logs, strict=True):
        assert ours.get("loss", 0.0) == pytest.approx(theirs.get("loss", 0.0), rel=1e-5)
    assert sum("loss" in line for line in done.stdout.splitlines()) == 4  # steps 3 to 6, once each
    assert not list(shared.glob(".*partial")) and not (shared / STATE).exists()


def test_a_step_that_cannot_be_shared_evenly_is_a_user_error():
    assert list(Processes(1, 2).shares(4)) == [1, 3]
    with pytest.raises(UserError, match="accumulate=3 batches a step cannot be shared by 2 processes"):
        Processes(0, 2).shares(3)
