"""The only code that writes or reads a run directory.

A run directory is the source of truth for every table, so it survives a crash and refuses to lie:

    prompts.jsonl   one line per (prompt_id, method, repeat)            <- the line that makes a result count
    rounds.jsonl    that result's rounds, written and synced *before* its prompt line
    prompt_set.jsonl   each prompt's split and reference answer, written before the first result
    summary.json    estimators, with the schema version
    DONE            written last by atomic rename; holds the number of results

A writer killed at any byte leaves at most a torn last line and one orphaned line of rounds; opening the directory
again drops both, so a resumed run repeats the unfinished prompt and neither loses nor doubles another one.
Cost: two `fsync` calls per result, outside every timed section.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import yaml

from selfspec.errors import UserError
from selfspec.records.schema import (
    SCHEMA_VERSION,
    Key,
    PromptRecord,
    RoundRecord,
    TraceRecord,
    check_version,
    key_of,
    parse_object,
    prompt_from_dict,
    rounds_from_lists,
    show_key,
    to_json,
    to_lines,
    trace_from_dict,
    trace_to_dict,
)


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory, read and checked. `summary` is None until the run is finished."""

    path: Path
    config: dict[str, Any]
    provenance: dict[str, Any]
    prompts: list[PromptRecord]
    summary: dict[str, Any] | None
    config_hash: str
    finished: bool
    prompt_set: dict[str, dict[str, Any]] = field(default_factory=dict)  # prompt_id -> category, split, reference

    @property
    def only_tuning(self) -> bool:
        """Whether all of its prompts are for choosing settings."""
        return bool(self.prompt_set) and all(entry.get("split") == "tune" for entry in self.prompt_set.values())

    @property
    def references(self) -> dict[str, str]:
        return {name: entry["reference"] for name, entry in self.prompt_set.items() if entry.get("reference")}

    @property
    def score(self) -> str | None:
        """What answers are compared with references by."""
        asked = self.config.get("prompts")
        return asked.get("score") if isinstance(asked, dict) else None

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def rounds(self) -> dict[Key, list[RoundRecord]]:
        return {record.key: record.rounds for record in self.prompts}


# ---- writing


class RunWriter:
    """The one writer of a run directory. Opening it repairs what a killed writer left and takes the directory's lock.

    Raises `UserError` when another process is writing there, when the run is already finished and something is
    appended, or when the directory was written with another schema version.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = _take_lock(self.path)
        try:
            if not self.finished:
                _repair(self.path)
            self._keys = [record.key for record in _read_results(self.path)]
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


# ---- reading


def read_run(run_dir: str | Path, allow_unfinished: bool = False) -> Run:
    """Reads and checks a run directory without changing it.

    Raises `UserError` for a missing directory, a run without `DONE` (unless `allow_unfinished`; a torn last line is
    then left out), damaged lines, doubled results, or another schema version.
    """
    path = Path(run_dir)
    if not path.is_dir():
        raise UserError(f"{path} is not a run directory: no such folder.")
    finished = (path / "DONE").exists()
    if not finished and not allow_unfinished:
        raise UserError(f"{path} is not a finished run (no DONE file); resume it, or pass allow_unfinished=true.")
    prompts = _read_results(path)
    summary = None
    if finished:
        summary = _read_json(path / "summary.json")
        done = _read_json(path / "DONE")
        check_version(summary.get("schema_version"), path / "summary.json")
        check_version(done.get("schema_version"), path / "DONE")
        if done.get("num_results") != len(prompts):
            raise UserError(
                f"{path}: DONE counts {done.get('num_results')} results but prompts.jsonl holds {len(prompts)}; "
                "the run was changed after it finished. Measure it again."
            )
    config = _read_yaml(path / "config.yaml", required=finished)
    provenance_path = path / "provenance.json"
    provenance = _read_json(provenance_path) if finished or provenance_path.exists() else {}
    prompt_set = {str(entry.get("prompt_id")): entry for entry, _ in _json_lines(path / "prompt_set.jsonl")}
    return Run(path, config, provenance, prompts, summary, _config_hash(path, provenance), finished, prompt_set)


def read_traces(path: str | Path) -> list[TraceRecord]:
    """Reads what `write_traces` wrote."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} is not a trace file: no such file.")
    return [trace_from_dict(entry, where) for entry, where in _json_lines(path)]


# ---- details


def _take_lock(path: Path) -> BinaryIO:
    handle = open(path / ".lock", "ab")  # noqa: SIM115 - the lock lives as long as the handle, and dies with the process
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise UserError(
            f"{path} is being written by another process; wait for it, stop it, or choose another name for this run."
        ) from None
    return handle


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
            whole = _whole_lines((path / name).read_bytes())
            if len(whole) < (path / name).stat().st_size:
                os.truncate(path / name, len(whole))
    if not (path / "rounds.jsonl").exists():
        return
    known = {key_of(entry, where) for entry, where in _json_lines(path / "prompts.jsonl")}
    lines = (path / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    entries = _json_lines(path / "rounds.jsonl")
    kept = [line for line, (entry, where) in zip(lines, entries, strict=True) if key_of(entry, where) in known]
    if len(kept) < len(lines):
        write_atomic(path / "rounds.jsonl", b"".join(kept))


def _whole_lines(data: bytes) -> bytes:
    """`data` up to the last line that was written completely."""
    whole = data[: data.rfind(b"\n") + 1]
    last = whole[whole.rfind(b"\n", 0, -1) + 1 :]
    try:
        json.loads(last or b"{}")
    except ValueError:  # a crash of the machine can leave the length without the bytes
        return whole[: -len(last)]
    return whole


def _json_lines(path: Path) -> list[tuple[dict[str, Any], str]]:
    """Every whole line as (object, "file:line"); a line that is damaged before the end is an error."""
    if not path.exists():
        return []
    entries = []
    for number, line in enumerate(_whole_lines(path.read_bytes()).splitlines(), start=1):
        where = f"{path}:{number}"
        entries.append((parse_object(line, where), where))
    return entries


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise UserError(f"{path.parent} lacks {path.name}; the run directory is incomplete. Measure the run again.")
    return parse_object(path.read_bytes(), str(path))


def _read_yaml(path: Path, required: bool) -> dict[str, Any]:
    if not path.exists() and not required:
        return {}
    if not path.exists():
        raise UserError(f"{path.parent} lacks {path.name}; the run directory is incomplete. Measure the run again.")
    try:
        value = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise UserError(f"{path} is damaged ({problem}); restore the file or measure the run again.") from None
    if not isinstance(value, dict):
        found = f"should hold a mapping, found {type(value).__name__}"
        raise UserError(f"{path} {found}; restore the file or measure the run again.")
    return value


def _config_hash(path: Path, provenance: Mapping[str, Any]) -> str:
    """The hash of the resolved config: as recorded, else the end of the directory's name (`<name>-<hash8>`)."""
    recorded = provenance.get("config_hash")
    if isinstance(recorded, str) and recorded:
        return recorded[:8]
    match = re.search(r"-([0-9a-f]{8})$", path.resolve().name)
    if match is None:
        raise UserError(
            f"{path}: neither provenance.json nor the folder's name (`<name>-<hash8>`) gives a config hash."
        )
    return match.group(1)


def _read_results(path: Path) -> list[PromptRecord]:
    prompt_lines = _json_lines(path / "prompts.jsonl")  # before the rounds: a live writer is never ahead of us here
    rounds_of = {}
    for entry, where in _json_lines(path / "rounds.jsonl"):
        rounds_of[key_of(entry, where)] = (entry.get("rounds"), where)
    records: dict[Key, PromptRecord] = {}
    for entry, where in prompt_lines:
        record = prompt_from_dict(entry, where)
        if record.key in records:
            raise UserError(f"{where} repeats {show_key(record.key)}; two writers must have used this directory.")
        if record.key not in rounds_of:
            raise UserError(f"{where}: rounds.jsonl has no line for {show_key(record.key)}; measure the run again.")
        record.rounds = rounds_from_lists(*rounds_of[record.key])
        records[record.key] = record
    return list(records.values())
