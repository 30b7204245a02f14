"""Whether training multiplies in bfloat16 is chosen by what is faster here, said, kept, and no part of a run's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from selfspec.target import Target
from selfspec.target.fastest import Choice
from selfspec.training import job
from selfspec.training.trainer import TrainConfig

SETTINGS = {"warmup_steps": 0, "batch_rows": 1, "row_tokens": 48, "num_kept": 4, "checkpoint_every": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_left_open_it_is_what_is_faster_and_a_resumed_run_stays_the_same_run(
    dtype, chat_target: Target, data_folder: Callable[..., Path], tmp_path: Path, monkeypatch
):
    said: list[str] = []
    data = data_folder()

    def train(steps_allowed: int) -> dict:
        def report(record: dict) -> None:
            said.append(str(record.get("doing", "")))
            if record.get("step") == steps_allowed:
                raise InterruptedError

        config = TrainConfig(steps=3, log_every=1, **SETTINGS)
        return job.train_draft(chat_target, "eagle3", OPTIONS, config, data, tmp_path / "o", "c", report)

    monkeypatch.setattr(job, "fastest_product", lambda device: Choice(torch.float32, "float32: by the first clock"))
    with pytest.raises(InterruptedError):
        train(2)
    monkeypatch.setattr(job, "fastest_product", lambda device: Choice(dtype, "the second clock"))
    train(99)  # goes on, also where the choice has changed
    assert "products in float32: by the first clock" in said and "products in the second clock" in said
    facts = json.loads((tmp_path / "o" / "training.json").read_text())
    assert facts["train"]["autocast"] is (dtype == torch.bfloat16) and facts["target_dtype"] == "float32"
    named_true = TrainConfig(steps=3, log_every=1, autocast=True, **SETTINGS)
    again = job.train_draft(chat_target, "eagle3", OPTIONS, named_true, data, tmp_path / "o", "c", lambda _: None)
    assert again == facts["held_out"], "drafts from before the choice existed are of autocast=true: the same command"
    steps = [json.loads(line).get("step") for line in (tmp_path / "o" / "log.jsonl").read_text().splitlines()]
    assert max(steps) == 3


OPTIONS = {"feature_layers": (0, 1, 2), "num_steps": 2}
