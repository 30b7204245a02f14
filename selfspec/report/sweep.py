"""The best of many settings, without flattering it: which one, how sure, and what it still has to show.

Whoever reports the highest of M measured speedups reports a winner's luck too. Here every setting gets an interval that
holds for all M together (max-t bootstrap over prompts: Romano and Wolf 2005), and Holm's p-value beside it:

    t*_m = |mean*_m − mean_m| / s_m       of the log ratios, resampled by prompt, the same prompts for all m
    band = mean_m ± s_m * (95% quantile of max_m t*)

The speedup shown is still the chosen prompts' own. Measure the winner again on other prompts (prompts.split=report).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from selfspec.errors import UserError
from selfspec.records import PromptRecord
from selfspec.report.caption import caption, noise_notes
from selfspec.report.intervals import CONFIDENCE, RESAMPLES, Floats, holm, resample_counts, sign_flip_p_value
from selfspec.report.runs import Measured, told_apart
from selfspec.report.speedup import log_ratios, paired_times
from selfspec.report.statistics import BASELINE, BASELINE_AGAIN
from selfspec.report.tables import Block, Table, mark_notes, method_name

NOT_CANDIDATES = (BASELINE, BASELINE_AGAIN, "hf_generate")


@dataclass(frozen=True)
class Candidate:
    """One setting: a method of a run. low, high: its part of the simultaneous band; marks: those of its method."""

    name: str
    speedup: float
    low: float
    high: float
    p_holm: float
    marks: str = ""

    @property
    def pays(self) -> bool:
        """Band and test together: with a handful of prompts a band is too narrow, and the test knows."""
        return self.low > 1 and self.p_holm < 0.05


def candidates(runs: Sequence[Measured], seed: int = 0, resamples: int = RESAMPLES) -> list[Candidate]:
    """Every drafter of every run, fastest first.

    Raises UserError unless they share two prompts or more, and for a run whose times do not count.
    """
    if untimed := [item.name for item in runs if not item.timed]:
        raise UserError(
            f"{untimed[0]} was measured with measure.timed=false: its times mean nothing, so no setting of it is the "
            "fastest. Measure it timed, on a quiet machine, or leave it out; format=console shows its acceptance."
        )
    logs: dict[str, dict[str, float]] = {}
    marks: dict[str, str] = {}
    for item in runs:
        run = told_apart(item, runs)
        for method, stats in item.summary["methods"].items():
            if method not in NOT_CANDIDATES:
                name = method + run
                logs[name] = _log_ratio_by_prompt(item.run.prompts, method)
                marks[name] = method_name("", stats)
    shared = sorted(set.intersection(*(set(found) for found in logs.values()))) if logs else []
    if len(shared) < 2:
        raise UserError("there is nothing to choose from: the drafters of these runs share fewer than two prompts.")
    logs_PM = np.array([[logs[name][prompt] for name in logs] for prompt in shared])
    low_M, high_M = simultaneous_band(logs_PM, seed, resamples)
    p_holm = holm({name: sign_flip_p_value(logs_PM[:, m], seed, resamples) for m, name in enumerate(logs)})
    found = [
        Candidate(
            name, math.exp(logs_PM[:, m].mean()), math.exp(low_M[m]), math.exp(high_M[m]), p_holm[name], marks[name]
        )
        for m, name in enumerate(logs)
    ]
    return sorted(found, key=lambda one: -one.speedup)


def simultaneous_band(
    logs_PM: Floats, seed: int = 0, resamples: int = RESAMPLES, confidence: float = CONFIDENCE
) -> tuple[Floats, Floats]:
    """Lower and upper ends, one per column, that hold for all columns together with this confidence."""
    num_prompts = len(logs_PM)
    mean_M, s_M = logs_PM.mean(axis=0), logs_PM.std(axis=0, ddof=1) / math.sqrt(num_prompts)
    shifts_RM = resample_counts(num_prompts, seed, resamples) @ logs_PM / num_prompts - mean_M
    safe_M = np.where(s_M > 0, s_M, 1.0)
    widest = float(np.quantile(np.abs(shifts_RM / safe_M).max(axis=1), confidence))
    return mean_M - widest * s_M, mean_M + widest * s_M


def sweep_table(runs: Sequence[Measured]) -> Table:
    """One row per setting, fastest first."""
    found = candidates(runs)
    rows = [
        [one.name + one.marks, f"{one.speedup:.3f}", f"[{one.low:.3f}, {one.high:.3f}]", f"{one.p_holm:.3f}"]
        for one in found
    ]
    best = found[0]
    pays = "pays" if best.pays else "does not clearly pay"
    notes = [
        f"Best: {best.name}{best.marks}, which {pays} (its band of {best.low:.3f} to {best.high:.3f} against 1, and "
        f"p = {best.p_holm:.3f}).",
        f"Band: {CONFIDENCE:.0%} for all {len(found)} settings together (max-t bootstrap over prompts); p: paired test "
        "against no draft, Holm's correction over the settings.",
        "The best was chosen for being high on these prompts: report it from others (prompts.split=report).",
        *noise_notes(runs),
        *mark_notes(" ".join(row[0] for row in rows)),
    ]
    return Table("sweep", ["setting", "speedup vs AR", "band", "p"], [Block("settings", rows)], caption(runs), notes)


def _log_ratio_by_prompt(records: Sequence[PromptRecord], method: str) -> dict[str, float]:
    """Per prompt that both have: log of (AR's seconds per token / the method's)."""
    ours = [record for record in records if record.method == method]
    theirs = [record for record in records if record.method == BASELINE]
    found = {}
    for prompt_id in {record.prompt_id for record in ours}:
        pair = [[record for record in group if record.prompt_id == prompt_id] for group in (ours, theirs)]
        times_P4 = paired_times(*pair)
        if len(times_P4):
            found[prompt_id] = float(log_ratios(times_P4)[0])
    return found
