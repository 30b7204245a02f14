"""One method against the baseline, paired prompt by prompt: three speedups, their intervals, and a test.

All compare seconds per emitted token over prefill and decode. They differ in how prompts are averaged, and on the same
records they can read 2.29, 1.88 and 1.77; the geometric mean of paired ratios gives each prompt one vote and is the
headline.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from selfspec.report.estimators import Records, by_prompt, prompt_time
from selfspec.report.intervals import (
    CONFIDENCE,
    RESAMPLES,
    Floats,
    minimum_detectable_speedup,
    percentile_interval,
    resample_counts,
    sign_flip_p_value,
)


def paired_times(records: Records, baseline: Records) -> Floats:
    """[prompts, 4]: tokens, seconds, baseline tokens, baseline seconds; prompts and repeats both have, sorted by id."""
    ours, theirs = by_prompt(records), by_prompt(baseline)
    rows = []
    for prompt_id in ours:
        repeats = {r.repeat for r in ours[prompt_id]} & {r.repeat for r in theirs.get(prompt_id, [])}
        if repeats:
            mine = prompt_time([record for record in ours[prompt_id] if record.repeat in repeats])
            rows.append((*mine, *prompt_time([record for record in theirs[prompt_id] if record.repeat in repeats])))
    return np.array(rows, dtype=np.float64).reshape(-1, 4)


def speedup_total_time(times_P4: Floats) -> float:
    tokens, seconds, baseline_tokens, baseline_seconds = times_P4.sum(axis=0)
    return float((baseline_seconds / baseline_tokens) / (seconds / tokens))


def speedup_ratio_of_means(times_P4: Floats) -> float:
    rates = times_P4[:, 0] / times_P4[:, 1]
    baseline_rates = times_P4[:, 2] / times_P4[:, 3]
    return float(rates.mean() / baseline_rates.mean())


def speedup_paired_geomean(times_P4: Floats) -> float:
    return math.exp(float(log_ratios(times_P4).mean()))


def log_ratios(times_P4: Floats) -> Floats:
    """Per prompt: log of (baseline seconds per token / our seconds per token)."""
    tokens, seconds, baseline_tokens, baseline_seconds = times_P4.T
    return np.asarray(np.log(baseline_seconds / baseline_tokens) - np.log(seconds / tokens))


def speedups(
    records: Records, baseline: Records, seed: int = 0, resamples: int = RESAMPLES, confidence: float = CONFIDENCE
) -> dict[str, Any]:
    """The speedups with their intervals; every value is None when the two share no prompt."""
    names = [
        f"{name}{end}" for name in ("speedup_paired_geomean", "speedup_total_time") for end in ("", "_low", "_high")
    ]
    stats: dict[str, Any] = dict.fromkeys([*names, "speedup_ratio_of_means", "p_value", "minimum_detectable_speedup"])
    times_P4 = paired_times(records, baseline)
    stats["num_paired_prompts"] = len(times_P4)
    if len(times_P4) == 0:
        return stats
    stats["speedup_paired_geomean"] = speedup_paired_geomean(times_P4)
    stats["speedup_total_time"] = speedup_total_time(times_P4)
    stats["speedup_ratio_of_means"] = speedup_ratio_of_means(times_P4)
    if len(times_P4) < 2:  # one prompt says nothing about the spread between prompts
        return stats
    logs = log_ratios(times_P4)
    counts_RP = resample_counts(len(times_P4), seed, resamples)
    sums_R4 = counts_RP @ times_P4
    total_R = np.log(sums_R4[:, 3] / sums_R4[:, 2]) - np.log(sums_R4[:, 1] / sums_R4[:, 0])
    geomean_R = counts_RP @ logs / len(logs)
    for name, resampled_R in (("speedup_paired_geomean", geomean_R), ("speedup_total_time", total_R)):
        stats[f"{name}_low"], stats[f"{name}_high"] = percentile_interval(resampled_R, confidence)
    stats["p_value"] = sign_flip_p_value(logs, seed, resamples)
    stats["minimum_detectable_speedup"] = minimum_detectable_speedup(logs, confidence)
    return stats
