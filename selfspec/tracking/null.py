"""No tracking: the default, so that nothing asks for an account."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from selfspec.records import PromptRecord, RoundRecord


class NullTracker:
    """Takes everything and keeps nothing."""

    def start(
        self, config: Mapping[str, Any], *, run_name: str, group: str, job_type: str, run_dir: Path, config_hash: str
    ) -> None: ...

    def log_round(self, record: RoundRecord, *, method: str, prompt_id: str, repeat: int) -> None: ...

    def log_prompt(self, record: PromptRecord) -> None: ...

    def log(self, metrics: Mapping[str, float], *, step: int) -> None: ...

    def summary(self, values: Mapping[str, Any]) -> None: ...

    def keep(self, kind: str, name: str, paths: Sequence[Path]) -> None: ...

    def finish(self, exit_code: int = 0) -> None: ...
