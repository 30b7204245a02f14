"""The table of costs: what the cost model predicts beside what was measured, and where each draft would break even.

The numbers are the run's own (`costs` in summary.json, made by selfspec.measure.costs): they need the model's shape and
the machine's bandwidth, which records do not hold. A run from before there were any shows dashes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from selfspec.errors import UserError
from selfspec.report.caption import caption, noise_notes
from selfspec.report.runs import Measured
from selfspec.report.tables import DASH, Block, Table, mark_notes, method_name

HEADER = [
    "method",
    "K",
    "τ",
    "c\npred",
    "c",
    "v",
    "ms/token",
    "AR\nms/token",
    "S\nsimple",
    "S\nmodel",
    "α",
    "break-even\nα",
]


def has_costs(runs: Sequence[Measured]) -> bool:
    return any(_costs(item) for item in runs)


def cost_table(runs: Sequence[Measured]) -> Table:
    """One row per method that runs our loop. Raises UserError if no run holds costs."""
    if not has_costs(runs):
        raise UserError("no run holds costs: they are written when a run finishes. Finish it, or measure it again.")
    blocks, notes = [], []
    for item in runs:
        found = _costs(item)
        rows = [_row(name, item, found) for name in item.summary["methods"] if name in found.get("methods", {})]
        blocks.append(Block(item.label, rows))
        if found:
            read_gb, limit = found["read_bytes_per_s"] / 1e9, found["limit_tokens_per_s"]
            notes.append(
                f"{item.run.name}: an AR step reads {found['step_bytes'] / 1e6:.0f} MB ({found['context']} tokens of "
                f"context). This machine reads memory at {read_gb:.1f} GB/s, which allows {limit:.0f} tokens/s; AR "
                f"reaches {found['bandwidth_share']:.0%} of that."
            )
    notes += [
        "c, v: seconds per drafted token and per verify pass, in AR steps; c pred: by bytes read. Decode only.",
        "S simple: AR's ms/token over (draft + verify + other ms) / committed token: measured in parts, no prediction. "
        "S model: predicted, τ / (K c pred + 1): verification as one AR step. Break-even α: the constant chance of "
        "acceptance at which this K costs what it brings.",
        *noise_notes(runs),
        *mark_notes(" ".join(row[0] for block in blocks for row in block.rows)),
        f"{DASH} not measured, no model of it, or no α at which it would pay.",
    ]
    return Table("costs", HEADER, blocks, caption(runs), notes)


def _costs(item: Measured) -> Mapping[str, Any]:
    return (item.run.summary or {}).get("costs") or {}


def _row(name: str, item: Measured, found: Mapping[str, Any]) -> list[str]:
    own, stats = found["methods"][name], item.summary["methods"][name]
    return [
        method_name(name, stats),
        _number(own["num_drafted"], 1),
        _number(own["tau"], 2),
        _number(own["c_predicted"], 2),
        _number(own["c_measured"], 2),
        _number(own["v_measured"], 2),
        _number(1000 * own["round_s_per_token"], 1),
        _number(1000 * found["ar_s_per_token"], 1),
        _number(own["speedup_simple"], 2),
        _number(own["speedup_model"], 2),
        _number(stats["alpha"], 2),
        _number(own["break_even_alpha"], 2),
    ]


def _number(value: float | None, digits: int) -> str:
    return DASH if value is None else f"{value:.{digits}f}"
