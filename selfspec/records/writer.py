"""Writing a run directory (what stands in it: `selfspec.records.rundir`), so that a crash at any byte loses nothing.

A result's rounds are written and synced before its prompt line, which makes it count. Opening the directory again drops
a torn last line and rounds whose prompt line never came, so a resumed run repeats the unfinished prompt and neither
loses nor doubles another one. Cost: two `fsync` calls per result, outside every timed section.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from selfspec.errors import UserError
from selfspec.records.folder import take_lock
from selfspec.records.rundir import json_lines, read_results, whole_lines
from selfspec.records.schema import (
    SCHEMA_VERSION,
    Key,
    PromptRecord,
    TraceRecord,
    key_of,
    show_key,
    to_json,
    to_lines,
    trace_to_dict,
)


class RunWriter:
    """The one writer of a run directory. Opening it repairs what a killed writer left and takes the directory's lock.

    Raises `UserError` when another process is writing there, when the run is already finished and something is
    appended, or when the directory was written with another schema version.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir)
        self._lock = take_lock(self.path, "choose another name for this run")
        try:
            if not self.finished:
                _repair(self.path)
            self._keys = [record.key for record in read_results(self.path)]
            self._rounds = open(self.path / "rounds.jsonl", "ab", buffering=0)  # noqa: SIM115 - lives as long as the writer
            self._prompts = open(self.path / "prompts.jsonl", "ab", buffering=0)  # noqa: SIM115
        except BaseException:
            self._lock.close()
            raise
        self._done = set(self._keys)

    @property
    def finished(self) -> bool:
        return (self.path / "DONE").exists()

    def done_keys(self) -> set[Key]:
        """What is already measured, so that a resumed run can skip it."""
        return set(self._done)

    def append(self, record: PromptRecord) -> None:
        """Adds one result; when this returns, it is on disk."""
        if self.finished:
            raise UserError(f"{self.path} is a finished run (DONE exists); delete the directory to measure it again.")
        if record.key in self._done:
            raise UserError(f"{self.path} already holds {show_key(record.key)}; skip the keys in `done_keys()`.")
        rounds_line, prompt_line = to_lines(record)
        _append(self._rounds, rounds_line)
        _append(self._prompts, prompt_line)
        self._done.add(record.key)

    def write_text(self, name: str, text: str) -> None:
        """Writes a side file (`config.yaml`, `overrides.yaml`, `provenance.json`) whole or not at all."""
        write_atomic(self.path / name, text)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Writes `summary.json` and then `DONE`: from here on the run counts as complete."""
        self.write_text("summary.json", to_json({**summary, "schema_version": SCHEMA_VERSION}, indent=2) + "\n")
        self.write_text("DONE", to_json({"num_results": len(self._done), "schema_version": SCHEMA_VERSION}) + "\n")

    def close(self) -> None:
        for handle in (self._rounds, self._prompts, self._lock):
            handle.close()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write, sync, rename, sync the folder: a reader sees the old file or the new one, never half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with open(partial, "wb") as handle:
        handle.write(content.encode() if isinstance(content, str) else content)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(partial, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_traces(path: str | Path, traces: Iterable[TraceRecord]) -> None:
    """Writes traces as JSON lines, whole or not at all."""
    write_atomic(Path(path), "".join(to_json(trace_to_dict(trace)) + "\n" for trace in traces))


# ---- details


def _append(handle: FileIO, line: bytes) -> None:
    """Appends and syncs; a write that fails half-way (a full disk) is taken back, so no later line lands behind it."""
    start = os.fstat(handle.fileno()).st_size
    try:
        left = memoryview(line)
        while left:
            left = left[os.write(handle.fileno(), left) :]
        os.fsync(handle.fileno())
    except BaseException:
        os.ftruncate(handle.fileno(), start)
        raise


def _repair(path: Path) -> None:
    """Drops what a killed writer left: torn last lines, then rounds whose prompt line never came."""
    for name in ("prompts.jsonl", "rounds.jsonl"):
        if (path / name).exists():
            whole = whole_lines((path / name).read_bytes())
            if len(whole) < (path / name).stat().st_size:
                os.truncate(path / name, len(whole))
    if not (path / "rounds.jsonl").exists():
        return
    known = {key_of(entry, where) for entry, where in json_lines(path / "prompts.jsonl")}
    lines = (path / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    entries = json_lines(path / "rounds.jsonl")
    kept = [line for line, (entry, where) in zip(lines, entries, strict=True) if key_of(entry, where) in known]
    if len(kept) < len(lines):
        write_atomic(path / "rounds.jsonl", b"".join(kept))
