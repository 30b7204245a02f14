"""Reading a run directory; `selfspec.records.writer` writes it, and no other code does either.

A run directory is the source of truth for every table, so it survives a crash and refuses to lie:

    prompts.jsonl   one line per (prompt_id, method, repeat)            <- the line that makes a result count
    rounds.jsonl    that result's rounds, written and synced *before* its prompt line
    prompt_set.jsonl   each prompt's split and reference answer, written before the first result
    summary.json    estimators, with the schema version
    DONE            written last by atomic rename; holds the number of results

A writer killed at any byte leaves at most a torn last line and one orphaned line of rounds, which are no results yet;
anything else that is damaged, missing or doubled is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from selfspec.errors import UserError
from selfspec.records.schema import (
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
    trace_from_dict,
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
    prompts = read_results(path)
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
    prompt_set = {str(entry.get("prompt_id")): entry for entry, _ in json_lines(path / "prompt_set.jsonl")}
    return Run(path, config, provenance, prompts, summary, _config_hash(path, provenance), finished, prompt_set)


def read_traces(path: str | Path) -> list[TraceRecord]:
    """Reads what `write_traces` wrote."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} is not a trace file: no such file.")
    return [trace_from_dict(entry, where) for entry, where in json_lines(path)]


def read_results(path: Path) -> list[PromptRecord]:
    prompt_lines = json_lines(path / "prompts.jsonl")  # before the rounds: a live writer is never ahead of us here
    rounds_of = {}
    for entry, where in json_lines(path / "rounds.jsonl"):
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


# ---- files


def whole_lines(data: bytes) -> bytes:
    """`data` up to the last line that was written completely."""
    whole = data[: data.rfind(b"\n") + 1]
    last = whole[whole.rfind(b"\n", 0, -1) + 1 :]
    try:
        json.loads(last or b"{}")
    except ValueError:  # a crash of the machine can leave the length without the bytes
        return whole[: -len(last)]
    return whole


def json_lines(path: Path) -> list[tuple[dict[str, Any], str]]:
    """Every whole line as (object, "file:line"); a line that is damaged before the end is an error."""
    if not path.exists():
        return []
    entries = []
    for number, line in enumerate(whole_lines(path.read_bytes()).splitlines(), start=1):
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
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
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
