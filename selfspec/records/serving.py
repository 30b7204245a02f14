"""Records of serving: one *cell* is one method serving one load of requests on a number of rows.

A cell keeps the times themselves, so every throughput and latency is derived later (`selfspec.report.latency`). Times
are seconds since the cell began, kept to a tenth of a millisecond. On disk a cell is one line of `cells.jsonl`, written
when it is finished: a killed experiment loses at most the cell it was measuring.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from selfspec.errors import UserError
from selfspec.records.schema import SCHEMA_VERSION, check_version, parse_object, to_json

CellKey = tuple[str, int, int]  # method, rows, repeat


@dataclass(slots=True)
class ServedRequest:
    """One request from its arrival to its last token. A round's tokens arrive together, at its commit."""

    num_prompt_tokens: int
    arrival_s: float
    admitted_s: float  # it got a row
    num_drafted: int  # over all its rounds
    num_accepted: int
    tokens_sha: str  # of the generated token ids: equal for equal outputs
    commit_s: list[float] = field(default_factory=list)  # per round
    num_emitted: list[int] = field(default_factory=list)  # per round


@dataclass(slots=True)
class Cell:
    """One method, one number of rows, one pass over the load of a repeat."""

    method: str
    num_rows: int
    repeat: int
    open_loop: bool  # requests arrived at times of their own; else each waited for a free row and none was late
    lossy: bool
    synthetic: bool
    requests: list[ServedRequest] = field(default_factory=list)

    @property
    def key(self) -> CellKey:
        return (self.method, self.num_rows, self.repeat)


def cell_to_line(cell: Cell) -> bytes:
    entry: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
    entry |= {name: getattr(cell, name) for name in _CELL_FIELDS}
    entry["requests"] = [[_rounded(getattr(request, name)) for name in _REQUEST_FIELDS] for request in cell.requests]
    return to_json(entry).encode() + b"\n"


def cell_from_line(line: bytes, where: str) -> Cell:
    """UserError for a damaged line, another schema, or rounds without their times."""
    entry = parse_object(line, where)
    check_version(entry.get("schema_version"), where)
    try:
        head = {name: entry[name] for name in _CELL_FIELDS}
        cell = Cell(**head, requests=[ServedRequest(*values) for values in entry["requests"]])
    except (KeyError, TypeError) as error:
        raise UserError(f"{where} is not a cell of this schema ({error!r}); measure it again.") from None
    for number, request in enumerate(cell.requests):
        times = [request.arrival_s, request.admitted_s, *request.commit_s]
        if len(request.commit_s) != len(request.num_emitted) or not request.commit_s or sorted(times) != times:
            raise UserError(f"{where}: the rounds of request {number} do not fit together; measure the cell again.")
    return cell


def read_cells(path: str | Path) -> list[Cell]:
    """All finished cells; a torn last line is left out. Nothing is there: none."""
    file = Path(path)
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    cells: Mapping[CellKey, Cell] = {}
    for number, line in enumerate(lines, 1):
        cell = cell_from_line(line, f"{file}, line {number}")
        if cell.key in cells:
            raise UserError(f"{file}, line {number}: {cell.key} is there twice; remove one of them.")
        cells = {**cells, cell.key: cell}
    return list(cells.values())


def append_cell(path: str | Path, cell: Cell) -> None:
    """Adds a finished cell, in place of what a killed writer left of one; it is on disk when this returns."""
    with open(path, "a+b") as file:
        file.seek(0)
        kept = file.read()
        file.truncate(kept.rfind(b"\n") + 1)
        file.write(cell_to_line(cell))
        file.flush()
        os.fsync(file.fileno())


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


_CELL_FIELDS = [item.name for item in fields(Cell) if item.name != "requests"]
_REQUEST_FIELDS = [item.name for item in fields(ServedRequest)]
