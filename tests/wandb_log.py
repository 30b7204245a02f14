"""Reads what wandb wrote offline with wandb's own reader: `wandb leet inspect --json`, one line per record."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import wandb


@dataclass
class OfflineRun:
    """An offline run's content: names, config, history rows in order, summary, artifacts."""

    names: dict[str, Any] = field(default_factory=dict)  # run_id, display_name, run_group, job_type, ...
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, str] = field(default_factory=dict)  # metric or glob -> its step metric
    artifacts: dict[str, set[str]] = field(default_factory=dict)  # "type/name" -> file names
    exit_code: int | None = None
    kinds: set[str] = field(default_factory=set)

    @property
    def keys(self) -> set[str]:
        """Every key of the history and the summary, without wandb's own."""
        return {key for row in [*self.history, self.summary] for key in row if not key.startswith("_")}

    def rows(self, prefix: str) -> list[dict[str, Any]]:
        """History rows under a prefix, their keys without it."""
        rows = [
            {key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix)}
            for row in self.history
        ]
        return [row for row in rows if row]


def read_offline_run(run_dir: Path) -> OfflineRun:
    """The run of the measurement itself: the only one that is not about a single method."""
    (run,) = [run for run in read_offline_runs(run_dir) if "method" not in run.config]
    return run


def read_offline_runs(run_dir: Path) -> list[OfflineRun]:
    """Every offline run under `<run_dir>/wandb`, once wandb's process has written them to the end."""
    wandb.teardown()
    return [_read(path) for path in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb"))]


def _read(path: Path) -> OfflineRun:
    result = OfflineRun()
    for record in _records(path):
        kind = record["type"]
        content = record.get(kind) or {}
        result.kinds.add(kind)
        if kind == "run":
            result.config.update(content.get("config", {}).get("update", {}))
            result.names.update({name: value for name, value in content.items() if name != "config"})
        elif kind == "config":
            result.config.update(content.get("update", {}))
        elif kind == "history":
            result.history.append(content["item"])
        elif kind == "summary":
            result.summary.update(content.get("update", {}))
        elif kind == "metric":
            result.metrics[content.get("name") or content["glob_name"]] = content["step_metric"]
        elif kind == "artifact" or (kind == "request" and "log_artifact" in content):
            artifact = content if kind == "artifact" else content["log_artifact"]["artifact"]
            files = {entry["path"] for entry in artifact.get("manifest", {}).get("contents", [])}
            result.artifacts[f"{artifact['type']}/{artifact['name']}"] = files
        elif kind == "exit":
            result.exit_code = content.get("exit_code", 0)
    return result


def _records(path: Path) -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    return map(json.loads, done.stdout.splitlines())
