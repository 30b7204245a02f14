"""One line per event in `<run directory>/tracking.jsonl`: for `tail -f`, and for trackers that this package lacks.

A resumed run appends. Unlike the records beside it, the file is never read back by selfspec.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from selfspec.provenance import redact
from selfspec.records import PromptRecord, RoundRecord
from selfspec.tracking.base import prompt_metrics

FILE_NAME = "tracking.jsonl"


class JsonlTracker:
    """Events as JSON objects with `event`, `time_s` (Unix time) and the event's own fields."""

    def __init__(self) -> None:
        self._file: TextIO | None = None

    def start(
        self, config: Mapping[str, Any], *, run_name: str, group: str, job_type: str, run_dir: Path, config_hash: str
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = (run_dir / FILE_NAME).open("a", encoding="utf-8")
        self._write(
            "start",
            run_name=run_name,
            group=group,
            job_type=job_type,
            config_hash=config_hash,
            config=redact(config),
        )
        self._file.flush()

    def log_round(self, record: RoundRecord, *, method: str, prompt_id: str, repeat: int) -> None:
        self._write("round", method=method, prompt_id=prompt_id, repeat=repeat, **asdict(record))

    def log_prompt(self, record: PromptRecord) -> None:
        self._write(
            "prompt",
            method=record.method,
            prompt_id=record.prompt_id,
            repeat=record.repeat,
            category=record.category,
            finish_reason=record.finish_reason,
            **prompt_metrics(record),
        )
        if self._file is not None:
            self._file.flush()

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._write("log", step=step, metrics=dict(metrics))
        if self._file is not None:
            self._file.flush()

    def summary(self, values: Mapping[str, Any]) -> None:
        self._write("summary", values=redact(values))

    def keep(self, kind: str, name: str, paths: Sequence[Path]) -> None:
        self._write("keep", kind=kind, name=name, files=sorted(path.name for path in paths))

    def finish(self, exit_code: int = 0) -> None:
        self._write("finish", exit_code=exit_code)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, event: str, **fields: Any) -> None:
        if self._file is None:
            raise RuntimeError(f"{event} before start, or after finish")
        self._file.write(json.dumps({"event": event, "time_s": time.time(), **fields}, ensure_ascii=False) + "\n")
