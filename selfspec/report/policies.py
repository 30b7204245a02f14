"""How much of what its drafts allow does each lookahead policy reach? One block per drafter, one row per policy.

`share of oracle` compares with the best lookahead of every single round in hindsight (`selfspec.report.oracle`), `vs
best fixed K` with the best of the fixed lookaheads that the same run measured, paired by prompt. That one was chosen on
these very prompts, which flatters it and is hard on the policies.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from selfspec.errors import UserError
from selfspec.records import PromptRecord
from selfspec.report.caption import caption, estimator_notes
from selfspec.report.lookaheads import Group, Looked, groups_of
from selfspec.report.oracle import decode_rate, oracle_tokens_per_s, round_costs_s
from selfspec.report.runs import Measured
from selfspec.report.speedup import speedups
from selfspec.report.tables import DASH, Block, Table, mark_notes, method_name, speedup_cell

HEADER = ["policy", "tokens/s", "speedup vs AR", "τ", "share of\noracle", "vs best fixed K"]
ORACLE = (
    "Share of oracle: decoding tokens/s over those of the oracle, which makes what the drafter's longest fixed K "
    "committed, from one refused draft to the next, by the cheapest rounds whose drafts all stand. A round's cost: the "
    "mean of that fixed K in the run, of AR for no draft, lines in between. Exact for drafts that depend on the text "
    "alone, else an estimate; no bound on trees, or on longer drafts."
)


@dataclass(frozen=True)
class Reached:
    """One row. None: cannot be told from this run. versus_fixed: ratio to the best fixed K with its interval's ends."""

    group: Group
    method: Looked
    oracle_tokens_per_s: float | None
    share_of_oracle: float | None
    versus_fixed: tuple[float, float | None, float | None] | None
    is_best_fixed: bool


def reached(item: Measured) -> list[Reached]:
    """Every method with a drafter, drafter by drafter; none of a run whose times do not count."""
    return [row for group in groups_of(item) for row in _rows_of(group)] if item.timed else []


def has_policies(runs: Sequence[Measured]) -> bool:
    """Whether there is a drafter with two lookaheads to compare, by times that count."""
    return any(len(group.methods) > 1 for item in runs if item.timed for group in groups_of(item))


def policy_table(runs: Sequence[Measured]) -> Table:
    """Raises UserError unless some drafter was measured with several lookaheads."""
    if not has_policies(runs):
        raise UserError(
            "these runs compare no lookaheads: each drafter has one, or was untimed (measure.timed=false). Measure "
            "experiment=smollm2_policies, or a grid."
        )
    blocks = []
    for item in runs:
        rows = reached(item)
        for name in dict.fromkeys(row.group.name for row in rows):
            of_run = f" ({item.label})" if len(runs) > 1 else ""
            blocks.append(Block(f"{name}{of_run}", [_cells(row) for row in rows if row.group.name == name]))
    cells = " ".join(cell for block in blocks for row in block.rows for cell in row)
    notes = [*(item.label for item in runs if len(runs) == 1), *estimator_notes(runs), ORACLE]
    notes.append(
        "vs best fixed K: paired geometric mean of its seconds per token over the method's, with the interval over "
        "prompts; the K marked best is the best on these prompts, in hindsight."
    )
    notes += mark_notes(cells)
    notes.append(f"{DASH} not measured, or no bound.")
    return Table("policies", HEADER, blocks, caption(runs), notes)


def policies_csv(runs: Sequence[Measured]) -> str:
    """The same rows in full precision."""
    out = io.StringIO()
    lines = [line for item in runs for line in _lines(item)]
    writer = csv.DictWriter(out, list(lines[0]) if lines else ["run"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def _lines(item: Measured) -> Iterator[dict[str, Any]]:
    for row in reached(item):
        ratio, low, high = row.versus_fixed or (None, None, None)
        stats = row.method.stats
        line = {
            "run": item.name,
            "config_hash": item.run.config_hash,
            "drafter": row.group.name,
            "method": row.method.label,
            "policy": row.method.lookahead["kind"],
            "num_drafted": row.method.fixed,
            **{name: stats[name] for name in ("tokens_per_s", "decode_tokens_per_s", "al_pooled")},
            **{f"speedup_paired_geomean{end}": stats[f"speedup_paired_geomean{end}"] for end in ("", "_low", "_high")},
            "oracle_tokens_per_s": row.oracle_tokens_per_s,
            "share_of_oracle": row.share_of_oracle,
            "versus_best_fixed": ratio,
            "versus_best_fixed_low": low,
            "versus_best_fixed_high": high,
            "is_best_fixed": row.is_best_fixed,
        }
        yield {name: "" if value is None else value for name, value in line.items()}


def _rows_of(group: Group) -> Iterator[Reached]:
    best, bound = group.best_fixed, oracle_of(group)
    longest = max(group.by_k, default=0)
    for method in group.methods:
        share = None
        if bound is not None and not method.is_tree and method.longest <= longest:
            share = decode_rate(method.records) / bound
        yield Reached(group, method, bound, share, _versus(method, best), method is best)


def oracle_of(group: Group) -> float | None:
    """The drafter's bound in decoding tokens per second; None without a fixed lookahead."""
    if not group.by_k:
        return None
    costs_s = round_costs_s(baseline_of(group.run), {k: method.records for k, method in group.by_k.items()})
    return oracle_tokens_per_s([record.rounds for record in group.by_k[max(group.by_k)].records], costs_s)


def baseline_of(item: Measured) -> list[PromptRecord]:
    return [record for record in item.run.prompts if record.method == item.summary["baseline"]]


def _versus(method: Looked, best: Looked | None) -> tuple[float, float | None, float | None] | None:
    if best is None or method is best:
        return None
    found: Mapping[str, Any] = speedups(method.records, best.records)
    ratio, low, high = (found[f"speedup_paired_geomean{end}"] for end in ("", "_low", "_high"))
    return None if ratio is None else (ratio, low, high)


def _cells(row: Reached) -> list[str]:
    stats = row.method.stats
    return [
        method_name(row.method.policy, stats),
        f"{stats['tokens_per_s']:.1f}",
        speedup_cell(stats),
        DASH if stats["al_pooled"] is None else f"{stats['al_pooled']:.2f}",
        DASH if row.share_of_oracle is None else f"{row.share_of_oracle:.0%}",
        "best" if row.is_best_fixed else _ratio(row.versus_fixed),
    ]


def _ratio(given: tuple[float, float | None, float | None] | None) -> str:
    if given is None:
        return DASH
    ratio, low, high = given
    return f"{ratio:.3f}" + (f" [{low:.3f}, {high:.3f}]" if low is not None else "")
