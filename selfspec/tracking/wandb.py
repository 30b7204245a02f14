"""Weights & Biases, online or offline: the only module that imports wandb.

A comparison is one run of job type `compare` in the group of its study. There every method has its own charts, as the
keys show, and there are the tables, figures and files:

    <method>/round/num_accepted, ...      over <method>/round/index
    <method>/prompt/tokens_per_s, ...     over <method>/prompt/index
    <method>/rounds/num_accepted, ...     histograms of one result's rounds, over <method>/prompt/index
    whatever is given to `log`            over step
    methods, categories, positions        tables, from the summary
    figures/speedup, ...                  images
    summary                               the nested summary, joined by "/"

Beside it, when it is finished, one small run per method in a group that bears the run directory's name, its job type
what the method is (`baseline`, `self_draft`, `independent_draft`, `lookup`, `scripted`), all with the same keys:
`prompt/tokens_per_s`, `round/num_accepted` and the method's own summary. One click on that group, in W&B's list of
runs, lays self-drafts, independent draft and baselines over each other. Not under `wandb agent`, where every run is a
trial of the sweep.

What wandb would collect by itself is switched off, since it takes time on the cores that are being measured or tells
more than a paper should: console output, system metrics, host and user name, command line, code. Offline runs need
neither account nor network; `wandb sync <run directory>/wandb/offline-run-*` uploads them later. An online run whose
server cannot be reached goes on offline.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.provenance import host_hash, redact
from selfspec.records import PromptRecord, RoundRecord, read_run
from selfspec.tracking.base import ARTIFACTS, flatten, prompt_metrics
from selfspec.tracking.views import (
    MethodView,
    Table,
    category_table,
    method_table,
    method_views,
    position_table,
    round_histograms,
)

if TYPE_CHECKING:
    import wandb

logger = logging.getLogger("selfspec.tracking")

PROBE_TIMEOUT_S = 5.0
INIT_TIMEOUT_S = 20.0
FINISH_TIMEOUT_S = 120.0


def run_id(config_hash: str, run_dir: Path) -> str:
    """The W&B id: the same config in the same directory of the same host continues its run; no other run joins it."""
    place = hashlib.sha256(f"{host_hash()}:{run_dir.resolve()}".encode()).hexdigest()
    return f"{config_hash[:8]}-{place[:6]}"


def method_run_id(config_hash: str, run_dir: Path, method: str) -> str:
    return f"{run_id(config_hash, run_dir)}-{hashlib.sha256(method.encode()).hexdigest()[:6]}"


class WandbTracker:
    """One W&B run, and at its end one per method. Raises what wandb raises: `GuardedTracker` keeps the run going."""

    def __init__(
        self,
        *,
        offline: bool,
        project: str = "selfspec",
        entity: str | None = None,
        tags: tuple[str, ...] = (),
        artifacts: tuple[str, ...] = ARTIFACTS,
    ) -> None:
        self._offline = offline
        self._mode: Any = "offline"
        self._project = project
        self._entity = entity
        self._tags = tags
        self._artifacts = artifacts
        self._run: wandb.Run | None = None
        self._run_dir = Path()
        self._config: dict[str, Any] = {}
        self._config_hash = ""
        self._num_logged: dict[str, int] = {}  # by prefix such as "ar/round/": the x axis of its charts
        self._defined: set[str] = set()

    def start(
        self, config: Mapping[str, Any], *, run_name: str, group: str, job_type: str, run_dir: Path, config_hash: str
    ) -> None:
        import wandb

        # WANDB_MODE may turn an online run down, as everywhere with W&B; offline asks for nothing and stays offline.
        mode: Any = "offline" if self._offline else os.environ.get("WANDB_MODE", "online")
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            raise RuntimeError("no W&B login found; run `wandb login` first, or use tracking=wandb_offline")
        run_dir.mkdir(parents=True, exist_ok=True)
        self._run_dir, self._config_hash = run_dir, config_hash
        self._config = redact({**config, "config_hash": config_hash, "study": group, "methods_group": run_dir.name})
        self._num_logged = rows_already_there(run_dir)
        if mode == "online" and not answers(wandb.setup().settings.base_url):
            logger.warning("The W&B server does not answer. The run is kept offline, for `wandb sync`.")
            mode = "offline"
        self._mode = mode
        names = {"name": run_name, "group": group, "job_type": job_type}
        self._run = self._open(run_id(config_hash, run_dir), self._config, **names)
        _ = wandb.Histogram, wandb.Table, wandb.Image  # loaded now, since starting may take its time

    def log_round(self, record: RoundRecord, *, method: str, prompt_id: str, repeat: int) -> None:
        self._log_under(f"{method}/round/", {**asdict(record), "prompt_id": prompt_id, "repeat": repeat})

    def log_prompt(self, record: PromptRecord) -> None:
        about = {"prompt_id": record.prompt_id, "category": record.category, "repeat": record.repeat}
        histograms = _as_histograms({f"{record.method}/rounds/{k}": v for k, v in round_histograms([record]).items()})
        self._log_under(f"{record.method}/prompt/", {**prompt_metrics(record), **about}, histograms)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        for key in metrics:
            if self._num_logged.setdefault(key, 0) == 0:
                self._open_run.define_metric(key, step_metric="step")
            self._num_logged[key] += 1
        self._open_run.log({**metrics, "step": step})

    def summary(self, values: Mapping[str, Any]) -> None:
        self._open_run.summary.update(flatten(redact(values)))
        tables = {"methods": method_table(values), "categories": category_table(values)}
        tables["positions"] = position_table(values)
        if shown := {name: _as_table(table) for name, table in tables.items() if table.rows}:
            self._open_run.log(shown)
        if os.environ.get("WANDB_SWEEP_ID") is None:
            self._mirror_methods(values)

    def keep(self, kind: str, name: str, paths: Sequence[Path]) -> None:
        import wandb

        if kind not in self._artifacts:
            return
        about = {"config_hash": self._config_hash, "study": self._config.get("study"), "name": name}
        artifact = wandb.Artifact(artifact_name(kind, name), type=kind, metadata=about)
        for path in (path.resolve() for path in paths):
            for file in files_of(path) if path.is_dir() else [path]:
                # "immutable": uploaded from where it lies, without a copy in wandb's own folders.
                inside = file.relative_to(path.parent).as_posix()
                artifact.add_file(str(file), name=inside, policy="immutable")
        self._open_run.log_artifact(artifact)
        if kind == "figures":
            images = {f"figures/{path.stem}": wandb.Image(str(path)) for path in paths if path.suffix == ".png"}
            self._open_run.log(images)

    def finish(self, exit_code: int = 0) -> None:
        self._open_run.finish(exit_code=exit_code)
        self._run = None

    def _open(self, identity: str, config: Mapping[str, Any], *, name: str, group: str, job_type: str) -> wandb.Run:
        import wandb

        return wandb.init(
            mode=self._mode,
            project=self._project,
            entity=self._entity,
            tags=list(self._tags),
            dir=str(self._run_dir),
            id=identity,
            resume="allow"
            if self._mode == "online"
            else None,  # offline runs with equal ids are joined by `wandb sync`
            name=name,
            group=group,
            job_type=job_type,
            config=dict(config),
            reinit="create_new",  # a run that the caller has open stays open
            save_code=False,
            settings=wandb.Settings(
                silent=True,
                host=host_hash(),
                console="off",
                disable_git=True,
                disable_code=True,
                disable_job_creation=True,
                init_timeout=INIT_TIMEOUT_S,
                finish_timeout=FINISH_TIMEOUT_S,
                x_disable_meta=True,
                x_disable_machine_info=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )

    def _mirror_methods(self, summary: Mapping[str, Any]) -> None:
        """The runs that make methods comparable: from the run directory, which also has what an earlier start left."""
        if not summary.get("methods"):
            return
        for view in method_views(summary, results_in(self._run_dir), self._config.get("drafters") or {}):
            self._mirror_method(view)

    def _mirror_method(self, view: MethodView) -> None:
        drafter = (self._config.get("drafters") or {}).get(view.method)
        config = {**self._config, "drafters": None, "method": view.method, "drafter": drafter}
        identity = method_run_id(self._config_hash, self._run_dir, view.method)
        names = {"name": view.method, "group": self._run_dir.name, "job_type": view.role}
        run = self._open(identity, config, **names)
        try:
            run.define_metric("prompt/*", step_metric="prompt/index")
            for result in view.results:
                run.log(result)
            if view.histograms:
                run.log(_as_histograms(view.histograms))
            run.summary.update(flatten(redact(view.summary)))
        finally:
            run.finish()

    def _log_under(self, prefix: str, fields: Mapping[str, Any], beside: Mapping[str, Any] | None = None) -> None:
        """A row of its own; `beside` has whole keys and shares its x axis."""
        index = self._num_logged.get(prefix, 0)
        if prefix not in self._defined:
            self._defined.add(prefix)
            self._open_run.define_metric(f"{prefix}*", step_metric=f"{prefix}index", summary="none")
            for key in beside or ():
                self._open_run.define_metric(key, step_metric=f"{prefix}index", summary="none")
        self._num_logged[prefix] = index + 1
        row = {f"{prefix}index": index, **{f"{prefix}{key}": value for key, value in fields.items()}}
        self._open_run.log({**row, **(beside or {})})

    @property
    def _open_run(self) -> wandb.Run:
        if self._run is None:
            raise RuntimeError("not started, or already finished")
        return self._run


def artifact_name(kind: str, name: str) -> str:
    """`<kind>-<name>` in the letters that W&B allows; the name itself is in the artifact's metadata."""
    return re.sub(r"[^a-zA-Z0-9_.-]", "_", f"{kind}-{name}")[:128]


def files_of(folder: Path) -> list[Path]:
    """All files below the folder, but not wandb's own log of how it came about, nor hidden ones."""
    inside = ((path, path.relative_to(folder).parts) for path in sorted(folder.rglob("*")))
    return [
        path
        for path, parts in inside
        if path.is_file() and parts[0] != "wandb" and not any(part.startswith(".") for part in parts)
    ]


def answers(base_url: str) -> bool:
    """Whether anything speaks HTTP there. wandb itself would try for a minute, and then hold on to the run's id."""
    try:
        with urllib.request.urlopen(base_url, timeout=PROBE_TIMEOUT_S):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError, HTTPException):
        return False


def rows_already_there(run_dir: Path) -> dict[str, int]:
    """How many rows an earlier start has logged, by prefix: a resumed run goes on behind them."""
    counts: dict[str, int] = {}
    if (run_dir / "DONE").exists():
        return counts  # finished, and now shown from the beginning
    for record in results_in(run_dir):
        for prefix, number in ((f"{record.method}/prompt/", 1), (f"{record.method}/round/", len(record.rounds))):
            counts[prefix] = counts.get(prefix, 0) + number
    return counts


def results_in(run_dir: Path) -> list[PromptRecord]:
    has_results = (run_dir / "prompts.jsonl").exists()
    return read_run(run_dir, allow_unfinished=True).prompts if has_results else []


def _as_histograms(histograms: Mapping[str, tuple[list[float], list[float]]]) -> dict[str, Any]:
    import numpy as np
    import wandb

    return {
        name: wandb.Histogram(np_histogram=(np.array(pair[0]), np.array(pair[1]))) for name, pair in histograms.items()
    }


def _as_table(table: Table) -> wandb.Table:
    import wandb

    return wandb.Table(columns=list[str | int](table.columns), data=table.rows, allow_mixed_types=True)
