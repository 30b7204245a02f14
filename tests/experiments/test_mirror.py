"""A finished run shown to a tracker afterwards looks as if the tracker had been there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from selfspec.config import conf_dir
from selfspec.records import read_run
from selfspec.run import run_compare

REPO = Path(__file__).parent.parent.parent
TINY = ["experiment=smoke_tiny", "~drafters.ngram", "measure.max_prompts=1", "max_new_tokens=4", "measure.trace=0"]


def run_tiny(out: Path, *overrides: str) -> Path:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = compose("compare", [*TINY, f"output_dir={out}", *overrides])
    run_compare(composed)
    (done,) = out.rglob("DONE")
    return done.parent


def events(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "tracking.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key != "time_s"} for line in lines]


def test_a_run_measured_without_a_tracker_is_shown_later(tmp_path: Path):
    folder = run_tiny(tmp_path)
    assert not (folder / "tracking.jsonl").exists()
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    command = [sys.executable, str(REPO / "experiments" / "mirror.py"), f"runs={tmp_path}", "tracking=jsonl"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(folder)]
    shown = events(folder)
    run = read_run(folder)
    assert [event["event"] for event in shown].count("prompt") == len(run.prompts)
    assert [event["event"] for event in shown].count("round") == sum(len(record.rounds) for record in run.prompts)
    assert shown[-2]["event"] == "summary" and shown[-1] == {"event": "finish", "exit_code": 0}
    assert all((folder / name).read_bytes() == content for name, content in before.items()), "showing changes nothing"


def test_a_sweeps_trial_reports_although_it_was_measured_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An agent that got no metric would count the trial as failed."""
    folder = run_tiny(tmp_path, "tracking=jsonl")
    live = events(folder)
    run_tiny(tmp_path, "tracking=jsonl")
    assert events(folder) == live, "outside a sweep a finished run is only printed"
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep123")
    run_tiny(tmp_path, "tracking=jsonl")
    again = events(folder)[len(live) :]
    assert [event["event"] for event in again] == [event["event"] for event in live]
    without_summary = [[event for event in some if event["event"] != "summary"] for some in (live, again)]
    assert without_summary[0] == without_summary[1]
