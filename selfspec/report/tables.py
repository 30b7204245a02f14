"""The tables of a paper, as data: which rows, which cells, which marks. `render` writes them in each format.

A cell that was not measured shows a dash, never a zero. Marks on a method: † lossy (its rule does not keep the
target's distribution), ‡ synthetic (scripted acceptance), ! not the target's tokens; on a speedup: * differs from 1 at
5% after Holm's correction.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from selfspec.report.caption import caption, estimator_notes
from selfspec.report.runs import Measured

DASH = "—"
MARKS = {
    "†": "lossy: the acceptance rule does not keep the target's distribution",
    "‡": "synthetic: acceptance was scripted, not earned by a drafter",
    "*": "differs from 1 at the 5% level (paired test, Holm's correction over the methods of a run)",
    "~": "near tie: the first token that differs is within rounding of the target's best",
    "!": "mismatch: the tokens differ by more than rounding explains",
}


QUALITY = {"score": "reference_score", "ROUGE-L\nto AR": "rouge_l_to_baseline"}  # shown where there is such a number


@dataclass(frozen=True)
class Block:
    """The rows of one run."""

    label: str
    rows: list[list[str]]


@dataclass(frozen=True)
class Table:
    name: str  # file stem and LaTeX label
    header: list[str]  # a line break is where the console breaks it
    blocks: list[Block]
    caption: str
    notes: list[str]

    @property
    def one_line_header(self) -> list[str]:
        return [name.replace("/\n", "/").replace("\n", " ") for name in self.header]


def comparison_table(runs: Sequence[Measured]) -> Table:
    """One row per method: what it costs, what it gains over AR, and whether the tokens stayed AR's."""
    header = [
        "method",
        "tokens/s",
        "speedup vs AR",
        "τ",
        "α",
        "draft/verify/\nother %",
        "TTFT\nms",
        "peak\nGB",
        "equal\nto AR",
    ]
    extra = [column for column in QUALITY if any(_methods_with(item, QUALITY[column]) for item in runs)]
    header += extra
    blocks = [
        Block(
            item.label,
            [
                [*_comparison_row(name, stats, item), *(_number(stats[QUALITY[column]], 2) for column in extra)]
                for name, stats in item.summary["methods"].items()
            ],
        )
        for item in runs
    ]
    return _table("comparison", header, blocks, runs)


def _methods_with(item: Measured, statistic: str) -> bool:
    return any(stats[statistic] is not None for stats in item.summary["methods"].values())


def category_table(runs: Sequence[Measured]) -> Table:
    """One row per method, its speedup per category and overall: the form Spec-Bench readers expect."""
    categories = sorted({name for item in runs for name in item.summary["categories"]})
    blocks = []
    for item in runs:
        rows = []
        for name, overall in item.summary["methods"].items():
            per_category = [item.summary["categories"].get(category, {}).get(name) for category in categories]
            cells = [speedup_cell(stats, is_baseline=False) if stats else DASH for stats in per_category]
            if name != item.summary["baseline"]:
                rows.append(
                    [method_name(name, overall), *cells, speedup_cell(overall), _number(overall["al_pooled"], 2)]
                )
        blocks.append(Block(item.label, rows))
    return _table("categories", ["method", *categories, "overall", "τ"], blocks, runs)


def to_csv(runs: Sequence[Measured]) -> str:
    """Every statistic of every method, overall and per category, in full precision and traceable to its run."""
    rows = []
    for item in runs:
        head = {"run": item.name, "config_hash": item.run.config_hash, "finished": item.run.finished}
        scopes = [("overall", item.summary["methods"]), *item.summary["categories"].items()]
        for category, methods in scopes:  # a list: prompts may have a category that is called "overall"
            for name, stats in methods.items():
                rows.append({**head, "category": category, "method": name, **_flat(stats)})
    columns = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _table(name: str, header: list[str], blocks: list[Block], runs: Sequence[Measured]) -> Table:
    cells = " ".join(cell for block in blocks for row in block.rows for cell in row)
    notes = estimator_notes(runs) + mark_notes(cells)
    if any(_methods_with(item, "reference_score") for item in runs):
        names = sorted({str(item.run.score) for item in runs if item.run.score})
        notes.append(f"score: {', '.join(names)} of the answers against the prompt set's references.")
    if DASH in cells:
        notes.append(f"{DASH} not measured for this method.")
    return Table(name, header, blocks, caption(runs), notes)


def _comparison_row(name: str, stats: Mapping[str, Any], item: Measured) -> list[str]:
    is_baseline = name == item.summary["baseline"]
    shares: list[Any] = [stats[f"{phase}_share"] for phase in ("draft", "verify", "other")]
    peak_bytes = stats["peak_device_bytes"] if stats["peak_device_bytes"] is not None else stats["peak_host_bytes"]
    return [
        method_name(name, stats),
        _number(stats["tokens_per_s"], 1),
        speedup_cell(stats, is_baseline),
        _number(stats["al_pooled"], 2),
        _number(stats["alpha"], 2),
        DASH if None in shares else "/".join(_percentages(shares)),
        DASH if stats["ttft_median_s"] is None else _number(stats["ttft_median_s"] * 1000, 0),
        DASH if peak_bytes is None else _number(peak_bytes / 1e9, 2),
        DASH if is_baseline else _equality(stats["equality"]),
    ]


def mark_notes(cells: str) -> list[str]:
    """What the marks in these cells mean."""
    return [f"{mark} {meaning}." for mark, meaning in MARKS.items() if mark in cells]


def method_name(name: str, stats: Mapping[str, Any]) -> str:
    """The method with the marks that its numbers must not be read without."""
    differs = bool(stats["equality"]) and stats["equality"]["mismatch"] > 0
    return name + "†" * bool(stats["lossy"]) + "‡" * bool(stats["synthetic"]) + "!" * differs


def speedup_cell(stats: Mapping[str, Any], is_baseline: bool = False) -> str:
    ratio, low, high = (stats[f"speedup_paired_geomean{end}"] for end in ("", "_low", "_high"))
    if ratio is None or is_baseline:
        return DASH if ratio is None else "1.00"
    mark = "*" if stats["p_value_holm"] is not None and stats["p_value_holm"] < 0.05 else ""
    return f"{ratio:.2f}{mark}" + (f" [{low:.2f}, {high:.2f}]" if low is not None else "")


def _equality(counts: Mapping[str, int] | None) -> str:
    if counts is None:
        return DASH
    extra = [f"{counts[name]}{mark}" for name, mark in (("near_tie", "~"), ("mismatch", "!")) if counts[name]]
    return f"{counts['identical']}/{sum(counts.values())}" + (f" ({' '.join(extra)})" if extra else "")


def _percentages(shares: Sequence[float]) -> list[str]:
    """Whole percentages that add up to 100 (largest remainders)."""
    floors = [int(100 * share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: floors[i] - 100 * shares[i])
    for i in by_remainder[: 100 - sum(floors)]:
        floors[i] += 1
    return [str(value) for value in floors]


def _number(value: float | None, digits: int) -> str:
    return DASH if value is None else f"{value:.{digits}f}"


def _flat(stats: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in stats.items():
        if name == "equality":
            flat |= {f"equal_{kind}": (value or {}).get(kind, "") for kind in ("identical", "near_tie", "mismatch")}
        elif isinstance(value, list):
            flat[name] = ";".join("" if entry is None else repr(entry) for entry in value)
        else:
            flat[name] = "" if value is None else value
    return flat
