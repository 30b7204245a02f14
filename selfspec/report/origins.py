"""Which runs the files of a study's folder were made from, kept beside them, so that those of earlier runs can go.

    made_from.json   {"comparison.md": ["paper-0123abcd", "paper_t1-4567cdef"], "trace-paper-0123abcd.html": [...]}

A file that is not in it is somebody's own, whatever its name. Cost: one small file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from selfspec.errors import UserError
from selfspec.records import to_json, write_atomic
from selfspec.report.build import trace_file
from selfspec.report.runs import Measured

RECORD = "made_from.json"
Origins = dict[str, list[str]]  # a file's name -> its runs' names


def origins(files: Iterable[Path], runs: Sequence[Measured]) -> Origins:
    """Of what `build_report` has made: a trace page is of one run, everything else of all."""
    pages = {trace_file(item): [item.name] for item in runs}
    return {file.name: pages.get(file.name, [item.name for item in runs]) for file in files}


def remove_leftovers(folder: Path, made: Origins, runs: Sequence[Measured]) -> list[Path]:
    """Records what was made just now and removes what was recorded before and holds a run that is none of `runs` any
    more; returns what was removed. What was made of these runs in other formats stays.

    Raises UserError for a record that this module did not write; nothing is removed then.
    """
    names = {item.name for item in runs}
    before = _recorded(folder / RECORD)
    kept = {name: of for name, of in before.items() if names.issuperset(of)} | made
    gone = [folder / name for name in sorted(before.keys() - kept.keys()) if (folder / name).is_file()]
    for path in gone:
        path.unlink()
    write_atomic(folder / RECORD, to_json(dict(sorted(kept.items())), indent=2) + "\n")
    return gone


def _recorded(path: Path) -> Origins:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
        plain = all(Path(name).name == name and isinstance(of, list) for name, of in found.items())
    except (ValueError, AttributeError):
        plain = False
    if not plain:
        raise UserError(
            f"{path} is no record of the files beside it. Delete it, and none goes; or choose another out=..."
        )
    return {name: [*map(str, of)] for name, of in found.items()}
