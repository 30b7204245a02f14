"""Weights & Biases, online or offline: the only module that imports wandb.

In W&B every method has its own charts, as the keys show:

    <method>/round/num_accepted, ...      over <method>/round/index
    <method>/prompt/tokens_per_s, ...     over <method>/prompt/index
    whatever is given to `log`            over step
    summary                               the nested summary, joined by "/"

What wandb would collect by itself is switched off, since it takes time on the cores that are being measured or tells
more than a paper should: console output, system metrics, host and user name, command line, code. Offline runs need
neither account nor network; `wandb sync <run directory>/wandb/offline-run-*` uploads them later.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.provenance import host_hash, redact
from selfspec.records import PromptRecord, RoundRecord
from selfspec.tracking.base import flatten, prompt_metrics

if TYPE_CHECKING:
    import wandb

INIT_TIMEOUT_S = 20.0
FINISH_TIMEOUT_S = 120.0


def run_id(config_hash: str, run_dir: Path) -> str:
    """The W&B id: the same config in the same directory of the same host continues its run; no other run joins it."""
    place = hashlib.sha256(f"{host_hash()}:{run_dir.resolve()}".encode()).hexdigest()
    return f"{config_hash[:8]}-{place[:6]}"


class WandbTracker:
    """One W&B run. Raises what wandb raises: `GuardedTracker` around it keeps the measurement going."""

    def __init__(
        self, *, offline: bool, project: str = "selfspec", entity: str | None = None, tags: tuple[str, ...] = ()
    ) -> None:
        self._offline = offline
        self._project = project
        self._entity = entity
        self._tags = tags
        self._run: wandb.Run | None = None
        self._num_logged: dict[str, int] = {}  # by prefix such as "ar/round/": the x axis of its charts

    def start(
        self, config: Mapping[str, Any], *, run_name: str, group: str, job_type: str, run_dir: Path, config_hash: str
    ) -> None:
        import wandb

        # WANDB_MODE may turn an online run down, as everywhere with W&B; offline asks for nothing and stays offline.
        mode: Any = "offline" if self._offline else os.environ.get("WANDB_MODE", "online")
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            raise RuntimeError("no W&B login found; run `wandb login` first, or use tracking=wandb_offline")
        run_dir.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            mode=mode,
            project=self._project,
            entity=self._entity,
            tags=list(self._tags),
            dir=str(run_dir),
            id=run_id(config_hash, run_dir),
            resume="allow" if mode == "online" else None,  # offline runs with equal ids are joined by `wandb sync`
            name=run_name,
            group=group,
            job_type=job_type,
            config=redact({**config, "config_hash": config_hash}),
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

    def log_round(self, record: RoundRecord, *, method: str, prompt_id: str, repeat: int) -> None:
        self._log_under(f"{method}/round/", {**asdict(record), "prompt_id": prompt_id, "repeat": repeat})

    def log_prompt(self, record: PromptRecord) -> None:
        about = {"prompt_id": record.prompt_id, "category": record.category, "repeat": record.repeat}
        self._log_under(f"{record.method}/prompt/", {**prompt_metrics(record), **about})

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        for key in metrics:
            if self._num_logged.setdefault(key, 0) == 0:
                self._open_run.define_metric(key, step_metric="step")
            self._num_logged[key] += 1
        self._open_run.log({**metrics, "step": step})

    def summary(self, values: Mapping[str, Any]) -> None:
        self._open_run.summary.update(flatten(redact(values)))

    def finish(self, exit_code: int = 0) -> None:
        self._open_run.finish(exit_code=exit_code)
        self._run = None

    def _log_under(self, prefix: str, fields: Mapping[str, Any]) -> None:
        index = self._num_logged.get(prefix, 0)
        if index == 0:
            self._open_run.define_metric(f"{prefix}*", step_metric=f"{prefix}index")
        self._num_logged[prefix] = index + 1
        self._open_run.log({f"{prefix}index": index, **{f"{prefix}{key}": value for key, value in fields.items()}})

    @property
    def _open_run(self) -> wandb.Run:
        if self._run is None:
            raise RuntimeError("not started, or already finished")
        return self._run
