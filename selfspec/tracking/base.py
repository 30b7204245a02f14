"""The seam between a run and whatever mirrors it. Run directories are the source of truth; a tracker only shows them.

A run calls: `start` once, then for every result its rounds and the result, `log` for anything else (training),
`summary` once, `keep` for each kind of file that is worth keeping, `finish` always (0: finished; else: failed). All of
them may be called with plain numbers only, and only outside timed sections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

from selfspec.records import PromptRecord, RoundRecord

ROUND_METRICS = tuple(one.name for one in fields(RoundRecord))
ARTIFACTS = ("records", "drafts", "figures")


class Tracker(Protocol):
    """What a run tells a tracker."""

    def start(
        self,
        config: Mapping[str, Any],
        *,
        run_name: str,
        group: str,
        job_type: str,
        run_dir: Path,
        config_hash: str,
    ) -> None:
        """Opens the run. The same `config_hash` in the same `run_dir` continues the same run."""

    def log_round(self, record: RoundRecord, *, method: str, prompt_id: str, repeat: int) -> None:
        """One round of one result."""

    def log_prompt(self, record: PromptRecord) -> None:
        """One result, after its rounds."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Any other numbers over steps: a training loss."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """The run's final numbers, nested as you like."""

    def keep(self, kind: str, name: str, paths: Sequence[Path]) -> None:
        """Files and folders of this run, final by now; kind is one of ARTIFACTS."""

    def finish(self, exit_code: int = 0) -> None:
        """Closes the run."""


def log_result(tracker: Tracker, record: PromptRecord) -> None:
    """A result as `log_round` and `log_prompt` want it: its rounds in order, then itself."""
    for round_record in record.rounds:
        tracker.log_round(round_record, method=record.method, prompt_id=record.prompt_id, repeat=record.repeat)
    tracker.log_prompt(record)


def prompt_metrics(record: PromptRecord) -> dict[str, float]:
    """The numbers of one result, without its text and tokens: prompts may be private."""
    num_tokens = len(record.token_ids)
    metrics: dict[str, float] = {
        "num_prompt_tokens": record.num_prompt_tokens,
        "num_tokens": num_tokens,
        "prefill_s": record.prefill_s,
        "ttft_s": record.ttft_s,
        "decode_s": record.decode_s,
        "total_s": record.total_s,
    }
    if record.total_s > 0:
        metrics["tokens_per_s"] = num_tokens / record.total_s
    if record.rounds:
        metrics["num_rounds"] = len(record.rounds)
        metrics["acceptance_length"] = sum(one.num_emitted for one in record.rounds) / len(record.rounds)
    if record.alpha_sum is not None and record.alpha_count:
        metrics["alpha"] = record.alpha_sum / record.alpha_count
    if record.equals_ar is not None:
        metrics["equals_ar"] = float(record.equals_ar)
    return metrics


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one level, `{"ar": {"al": 1}}` -> `{"ar/al": 1}`; lists become `name/0`, `name/1`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, list | tuple):
            value = {str(index): inner for index, inner in enumerate(value)}
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{name}/"))
        elif value is not None:
            flat[name] = value
    return flat
