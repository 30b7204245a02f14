"""A finished draft is kept where its training was shown."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from wandb_log import read_offline_run

from selfspec.config import conf_dir
from selfspec.tracking import build_tracker, guard
from selfspec.training.config import TrainJobConfig, resolve_job
from selfspec.training.trainer import ALONE

ROOT = Path(__file__).parents[2]
FILES = {"README.md", "config.json", "log.jsonl", "model.safetensors", "training.json"}


def train_entry() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_entry", ROOT / "experiments" / "train.py")
    assert spec is not None and spec.loader is not None
    entry = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(entry)
    return entry


@pytest.mark.parametrize("kind", ["wandb_offline", "jsonl", "none"])
def test_the_finished_draft_is_an_artifact_and_other_trackers_do_not_mind(kind: str, tmp_path: Path, monkeypatch):
    """The training itself is a stand-in that leaves a draft's files; the tracker, and what reads it back, are wandb."""
    entry = train_entry()

    def trained(target: Any, kind: str, options: Any, train: Any, data: Any, out: str, *rest: Any) -> dict[str, Any]:
        for name in FILES:
            (Path(out) / name).write_text(f"{kind}: {name}")
        return {"alpha": 0.5}

    monkeypatch.setattr(entry, "train_draft", trained)
    monkeypatch.setattr(entry, "load_target", lambda *given, **options: SimpleNamespace(name=""))
    monkeypatch.setattr(entry, "HydraConfig", SimpleNamespace(get=lambda: SimpleNamespace(runtime=RUNTIME)))
    for name in ("PATIENCE_S", "START_PATIENCE_S", "FINISH_PATIENCE_S"):
        monkeypatch.setattr(guard, name, 150.0)
    folder = tmp_path / "eagle3"
    folder.mkdir()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = compose("train", ["drafter=eagle3", "runtime.num_threads=null", "data=d", f"out={folder}"])
    tracker = build_tracker(kind)
    tracker.start({}, run_name="eagle3", group="g", job_type="train", run_dir=folder, config_hash="0123abcd")
    entry.run(resolve_job(TrainJobConfig, composed), tracker, ALONE)
    tracker.finish()
    if kind == "wandb_offline":
        log = read_offline_run(folder)
        assert log.artifacts == {"drafts/drafts-eagle3": {f"eagle3/{name}" for name in FILES}}
        assert log.summary["alpha"] == 0.5
    assert {path.name for path in folder.iterdir()} >= FILES


RUNTIME = SimpleNamespace(choices={"target": "smollm2-135m"})
