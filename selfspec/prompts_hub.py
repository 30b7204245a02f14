"""Prompt sets of a data set hub, or of a folder in its formats, as lines of the JSONL format of `selfspec.prompts`.

A set is named by its revision, a full commit id, because a branch can change under a table's feet; what was read is
hashed besides, and `content_sha256` refuses anything else. The library `datasets` is needed only here, and only then:

    pip install 'selfspec[data]'

Cost: the whole split is downloaded once and kept in the library's own cache.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from selfspec.errors import UserError

COMMIT = re.compile(r"[0-9a-f]{40}")
COLUMN = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class HubSet:
    """A conf/prompts file with `hub`. Texts are columns (`question`) or templates (`Q: {question}`)."""

    hub: str  # owner/name, or a folder with parquet, csv or json files
    revision: str | None = None  # a full commit id; not of a folder
    subset: str | None = None  # the hub's "config"
    hub_split: str = "test"
    turns: str = "prompt"  # the column with the text or the list of texts, or a template
    id: str | None = None  # a column; null: the place in the split
    category: str | None = None  # a column; null: the set's name
    reference: str | None = None  # a column or a template
    content_sha256: str | None = None  # of the prompts as read (`prompts` in provenance.json); null: not checked


def hub_set(config: Mapping[str, Any], others: tuple[str, ...]) -> HubSet:
    """The config as checked options; `others` are the keys that select among the prompts."""
    names = [field.name for field in fields(HubSet)]
    unknown = sorted(set(config) - {*names, *others})
    if unknown:
        raise UserError(f"prompts.{unknown[0]} is unknown. Allowed with hub: {', '.join([*names, *others])}.")
    given = {name: config[name] for name in names if config.get(name) is not None}
    if wrong := [name for name, value in given.items() if not isinstance(value, str)]:
        raise UserError(f"prompts.{wrong[0]}={given[wrong[0]]!r} is not a text.")
    return HubSet(**given)


def hub_lines(options: HubSet) -> list[dict[str, Any]]:
    """One object per row of the split. Raises UserError for everything that cannot be read as asked."""
    try:
        import datasets
    except ImportError:
        raise UserError("prompts.hub needs the library datasets. Install it: pip install 'selfspec[data]'") from None
    folder = Path(options.hub).expanduser()
    if not folder.is_dir() and not COMMIT.fullmatch(options.revision or ""):
        raise UserError(
            f"prompts.revision={options.revision!r} is not a full commit id (40 digits): a branch or a tag may change, "
            f"and with it what a table means. Take it from the list of commits of {options.hub}."
        )
    name = str(folder) if folder.is_dir() else options.hub
    revision = None if folder.is_dir() else options.revision
    try:
        rows = datasets.load_dataset(name, options.subset, split=options.hub_split, revision=revision)
    except Exception as error:  # the library raises what its many readers raise
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(
            f"cannot read {options.hub} (subset {options.subset}, split {options.hub_split}): {reason} A local copy "
            "serves as well: prompts.hub=<its folder>, or prompts=jsonl prompts.path=<file>."
        ) from error
    return [_line(dict(row), place, options) for place, row in enumerate(rows)]


def _line(row: Mapping[str, Any], place: int, options: HubSet) -> dict[str, Any]:
    name = Path(options.hub).name
    line: dict[str, Any] = {
        "prompt_id": f"{name}-{_value(row, options.id, options) if options.id else place}",
        "category": str(_value(row, options.category, options)) if options.category else name,
        "turns": _value(row, options.turns, options),
    }
    if isinstance(line["turns"], str):
        line["turns"] = [line["turns"]]
    if options.reference:
        line["reference"] = _value(row, options.reference, options)
    return line


def _value(row: Mapping[str, Any], given: str, options: HubSet) -> Any:
    """A column as it is, or a template filled in."""
    wanted = COLUMN.findall(given) if "{" in given else [given]
    if missing := [column for column in wanted if column not in row]:
        raise UserError(f"{options.hub} has no column {missing[0]!r}. It has: {', '.join(row)}.")
    if "{" not in given:
        return row[given]
    return COLUMN.sub(lambda match: str(row[match[1]]), given)
