"""The tuner's table: every candidate that was run, predicted beside measured, and the winner on other prompts.

The winner is the fastest on the tuning prompts, and its speedup there is flattered by having been chosen. So its
interval comes from other prompts, and holds for all settings that were measured there together (selfspec.report.sweep).
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from selfspec.errors import UserError
from selfspec.report.caption import caption, noise_notes
from selfspec.report.intervals import CONFIDENCE
from selfspec.report.runs import Measured
from selfspec.report.statistics import BASELINE
from selfspec.report.sweep import Candidate, candidates
from selfspec.report.tables import DASH, Block, Table, mark_notes, method_name

HEADER = ["candidate", "predicted\ntokens/s", "measured\ntokens/s", "error", "speedup", "speedup,\nother prompts", ""]


@dataclass(frozen=True)
class Row:
    """One candidate. tuning, confirmed: its speedup with its part of the band; None for AR, or where it was not run.
    probed: its own rounds were measured for the prediction, which is therefore none.
    """

    label: str
    predicted_tokens_per_s: float
    measured_tokens_per_s: float
    tuning: Candidate | None
    confirmed: Candidate | None
    chosen: bool
    probed: bool = False

    @property
    def error(self) -> float:
        """Relative: above 0 where the prediction was too high."""
        return self.predicted_tokens_per_s / self.measured_tokens_per_s - 1


@dataclass(frozen=True)
class Tuned:
    """rows: fastest first on the tuning prompts, AR last. chosen: a candidate's label, or AR where none was faster."""

    rows: list[Row]
    chosen: str

    @property
    def errors(self) -> list[float]:
        """Of those that were predicted from other chains and trees than themselves."""
        return [abs(row.error) for row in self.rows if row.label != BASELINE and not row.probed]

    def as_dict(self) -> dict[str, Any]:
        return {
            "chosen": self.chosen,
            "prediction_error": {
                "median_abs_relative": statistics.median(self.errors) if self.errors else None,
                "max_abs_relative": max(self.errors, default=None),
                "num_candidates": len(self.errors),
            },
            "candidates": [
                {
                    "label": row.label,
                    "predicted_tokens_per_s": row.predicted_tokens_per_s,
                    "measured_tokens_per_s": row.measured_tokens_per_s,
                    "error": row.error,
                    "tuning": _numbers(row.tuning),
                    "confirmed": _numbers(row.confirmed),
                    "chosen": row.chosen,
                    "probed": row.probed,
                }
                for row in self.rows
            ],
        }


def ranked(run: Measured) -> list[str]:
    """The candidates of a run on tuning prompts, fastest first."""
    return [one.name for one in candidates([run])]


def tuned(predicted: Mapping[str, float], run: Measured, confirmed: Measured, probed: Collection[str] = ()) -> Tuned:
    """predicted: tokens/s by label, AR's among them. run: on tuning prompts; confirmed: the best of it on others.
    probed: labels whose own rounds the predictions were made from.

    Raises UserError for a prompt that is in both.
    """
    if both := {one.prompt_id for one in run.run.prompts} & {one.prompt_id for one in confirmed.run.prompts}:
        raise UserError(f"prompt {sorted(both)[0]!r} was measured in {run.run.path} and in {confirmed.run.path}.")
    found, again = candidates([run]), {one.name: one for one in candidates([confirmed])}
    chosen = found[0].name if found[0].speedup > 1 else BASELINE
    methods = run.summary["methods"]
    rows = [
        Row(
            label,
            predicted[label],
            methods[label]["tokens_per_s"],
            one,
            again.get(label),
            label == chosen,
            label in probed,
        )
        for label, one in [*((one.name, one) for one in found), (BASELINE, None)]
    ]
    return Tuned(rows, chosen)


def tuning_table(result: Tuned, run: Measured, confirmed: Measured, num_predicted: int) -> Table:
    """One row per candidate that was run, fastest first."""
    rows = [
        [
            method_name(row.label, run.summary["methods"][row.label]),
            f"{row.predicted_tokens_per_s:.1f}",
            f"{row.measured_tokens_per_s:.1f}",
            DASH if row.probed else f"{row.error:+.0%}",
            "1.00" if row.label == BASELINE else _speedup(row.tuning),
            "1.00" if row.label == BASELINE else _speedup(row.confirmed),
            "chosen" if row.chosen else "",
        ]
        for row in result.rows
    ]
    errors = result.errors
    off = f"median {statistics.median(errors):.1%}, largest {max(errors):.1%}" if errors else "not known"
    notes = [
        f"{num_predicted} candidates were predicted and {len(rows) - 1} of them run. Prediction error: {off} of the "
        f"measured tokens/s (prefill included), over the {len(errors)} whose own rounds the costs were not measured "
        "on; acceptance was measured on the same prompts.",
        f"Speedup: over AR, paired by prompt, on {run.summary['num_prompts']} tuning prompts, where the fastest was "
        f"chosen for being high; other prompts: {confirmed.summary['num_prompts']} that nothing was chosen on. Bands "
        f"of {CONFIDENCE:.0%} for all settings of a column together (max-t bootstrap over prompts).",
        verdict(result),
        f"{DASH} not measured there, or not predicted but known.",
    ]
    cells = " ".join(row[0] for row in rows)
    notes += [*noise_notes([confirmed]), *mark_notes(cells)]
    return Table("tune", HEADER, [Block(run.name, rows)], caption([confirmed]), notes)


def verdict(result: Tuned) -> str:
    """What came of it, in a sentence."""
    row = next(row for row in result.rows if row.chosen)
    if row.confirmed is None:
        return "Chosen: no draft; none was faster than AR on the tuning prompts."
    pays = "pays" if row.confirmed.pays else "does not pay" if row.confirmed.high < 1 else "does not clearly pay"
    return f"Chosen: {row.label}, which {pays} on other prompts: {_speedup(row.confirmed)} times AR."


def _speedup(one: Candidate | None) -> str:
    return DASH if one is None else f"{one.speedup:.2f} [{one.low:.2f}, {one.high:.2f}]"


def _numbers(one: Candidate | None) -> dict[str, float] | None:
    if one is None:
        return None
    return {"speedup": one.speedup, "low": one.low, "high": one.high, "p_holm": one.p_holm}
