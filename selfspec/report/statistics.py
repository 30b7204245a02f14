"""A run's summary: every number from its records alone, each under the name of its estimator.

The field reports one word for several numbers, so nothing here is called just "speedup" or "acceptance length":

    al_pooled               emitted tokens / verify passes, over all rounds
    al_per_prompt_mean      the mean over prompts of (emitted tokens / verify passes)
    speedup_total_time      (baseline seconds per token) / (method seconds per token), both summed over prompts
    speedup_paired_geomean  the geometric mean over prompts of the per-prompt ratio of seconds per token: the headline
    speedup_ratio_of_means  mean tokens/s of the method / mean tokens/s of the baseline: Spec-Bench's, for comparison
    alpha                   mean of sum_v min(p, q): the probability that one draft is accepted
    accepted_per_drafted    accepted / drafted tokens; depends on K, and is not alpha

Time is prefill and decode together unless the name says decode. A prompt measured several times counts once, with its
median seconds per token. Speedups use only prompts and repeats that both methods have. The formulas are in
`estimators`, `speedup` and `intervals`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

from selfspec.errors import UserError
from selfspec.records import by_method
from selfspec.report.checks import check_equality, check_record
from selfspec.report.estimators import (
    Records,
    accepted_per_drafted,
    al_per_prompt_mean,
    al_pooled,
    alpha,
    conditional_acceptance,
    decode_tokens_per_s,
    equality,
    joint_acceptance,
    phase_s_per_token,
    phase_shares,
    round_gaps_s,
    tokens_per_s,
    ttft_median_s,
    whole_rounds,
)
from selfspec.report.intervals import (
    CONFIDENCE,
    RESAMPLES,
    holm,
)
from selfspec.report.quality import quality
from selfspec.report.speedup import speedups

BASELINE = "ar"
BASELINE_AGAIN = "ar_again"  # the baseline measured once more, as the noise check
TIME = re.compile(r"_s$|_s_per_token$|_share$|speedup|p_value")  # names of statistics that come from clocks
Stats = dict[str, Any]


def summarise(
    records: Records,
    baseline: str = BASELINE,
    seed: int = 0,
    resamples: int = RESAMPLES,
    run: str = "this run",
    references: Mapping[str, str] | None = None,
    score: str | None = None,
) -> Stats:
    """Everything above for every method, overall and per category: the content of `summary.json`.

    `references`: right answers by prompt id, compared by `score` (selfspec.report.quality).

    Raises `UserError` (naming run, prompt and method) for an empty set or a record that contradicts itself.
    """
    if not records:
        raise UserError(f"{run} holds no results; nothing to summarise.")
    for record in records:
        check_record(record, run)
    check_equality(records, baseline, run)

    def table(group: Records) -> dict[str, Stats]:
        methods = _methods(group, baseline, seed, resamples)
        for method, stats in methods.items():
            own, theirs = ([r for r in group if r.method == which] for which in (method, baseline))
            stats.update(quality(own, theirs, references or {}, score))
        return methods

    shown = [record for record in records if record.method != BASELINE_AGAIN]
    categories = sorted({record.category for record in shown})
    return {
        "baseline": baseline,
        "num_prompts": len({record.prompt_id for record in records}),
        "num_repeats": len({record.repeat for record in records}),
        "interval": {"confidence": CONFIDENCE, "resamples": resamples, "seed": seed, "clustered_by": "prompt"},
        "noise_check": noise_check(records, baseline, seed, resamples),
        "methods": table(shown),
        "categories": {name: table([r for r in shown if r.category == name]) for name in categories},
    }


def without_times(summary: Stats) -> Stats:
    """The summary of a run whose clocks mean nothing (`measure.timed=false`): acceptance and equality, no times.

    Taken out here, where every table, figure and search begins, so that none of them can show one by mistake.
    """

    def kept(methods: Mapping[str, Stats]) -> dict[str, Stats]:
        return {
            method: {name: None if TIME.search(name) else value for name, value in stats.items()}
            for method, stats in methods.items()
        }

    categories = {name: kept(methods) for name, methods in summary["categories"].items()}
    return {**summary, "noise_check": None, "methods": kept(summary["methods"]), "categories": categories}


def noise_check(records: Records, baseline: str = BASELINE, seed: int = 0, resamples: int = RESAMPLES) -> Stats | None:
    """The baseline against itself, measured as a method like any other; in runs without that, its odd repeats against
    its even ones; None where there is neither.

    An interval that leaves out 1.00 means that the machine was not quiet, and the run is marked noisy. On a quiet one
    that happens in one run of twenty.
    """
    again = [record for record in records if record.method == BASELINE_AGAIN]
    once = [record for record in records if record.method == baseline]
    if not again:
        once, again = (
            [replace(record, repeat=record.repeat // 2) for record in once if record.repeat % 2 == parity]
            for parity in (0, 1)
        )
    stats = speedups(again, once, seed, resamples)
    low, high = stats["speedup_paired_geomean_low"], stats["speedup_paired_geomean_high"]
    if low is None or high is None:
        return None
    return {
        "speedup_paired_geomean": stats["speedup_paired_geomean"],
        "speedup_paired_geomean_low": low,
        "speedup_paired_geomean_high": high,
        "noisy": not low <= 1.0 <= high,
    }


def _methods(records: Records, baseline: str, seed: int, resamples: int) -> dict[str, Stats]:
    """One entry per method, in the order in which the run measured them; Holm's correction over the methods."""
    groups = by_method(records)
    for group in groups.values():  # sums of floats then do not depend on the order of the lines
        group.sort(key=lambda record: (record.prompt_id, record.repeat))
    reference = groups.get(baseline, [])
    methods = {name: _method(group) for name, group in groups.items()}
    for name, stats in methods.items():
        stats.update(speedups(groups[name], reference, seed, resamples))
    adjusted = holm(_p_values(methods, baseline))
    for name, stats in methods.items():
        stats["p_value_holm"] = adjusted.get(name)
    return methods


def _p_values(methods: Mapping[str, Stats], baseline: str) -> dict[str, float]:
    return {name: s["p_value"] for name, s in methods.items() if name != baseline and s["p_value"] is not None}


def _method(records: Records) -> Stats:
    rounds = whole_rounds(records)
    joint = joint_acceptance(records)
    if rounds:
        length = fmean(entry.num_emitted for entry in rounds)
        assert math.isclose(length, 1.0 + sum(joint)), "over whole rounds, acceptance length is 1 + sum of joint"
    return {
        "num_prompts": len({record.prompt_id for record in records}),
        "num_repeats": len({record.repeat for record in records}),
        "num_tokens": sum(len(record.token_ids) for record in records),
        "lossy": any(record.lossy for record in records),
        "synthetic": any(record.synthetic or "synthetic" in record.method for record in records),
        "tokens_per_s": tokens_per_s(records),
        "decode_tokens_per_s": decode_tokens_per_s(records),
        "al_pooled": al_pooled(records),
        "al_per_prompt_mean": al_per_prompt_mean(records),
        "alpha": alpha(records),
        "accepted_per_drafted": accepted_per_drafted(records),
        "joint_acceptance": joint,
        "conditional_acceptance": conditional_acceptance(records),
        **phase_shares(records),
        **phase_s_per_token(records),
        "ttft_median_s": ttft_median_s(records),
        **round_gaps_s(records),
        "peak_device_bytes": _peak(record.peak_device_bytes for record in records),
        "peak_host_bytes": _peak(record.peak_host_bytes for record in records),
        "equality": equality(records),
    }


def _peak(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def best_of(methods: Mapping[str, Stats], baseline: str = BASELINE) -> tuple[str, float, float]:
    """(method, speedup_paired_geomean, p) for the fastest of a sweep, its p-value corrected for having looked at all.

    The speedup itself stays optimistic: it was chosen for being high. Measure the winner again on other prompts.
    """
    p_values = _p_values(methods, baseline)
    if not p_values:
        raise UserError(f"no method to choose from: none shares two prompts with the baseline {baseline!r}.")
    best = max(p_values, key=lambda name: float(methods[name]["speedup_paired_geomean"]))
    return best, float(methods[best]["speedup_paired_geomean"]), holm(p_values)[best]
