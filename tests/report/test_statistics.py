"""The numbers: worked examples with known answers, and what must not change them."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from made_runs import made_record, made_records, timed_record

from selfspec.report import estimators, intervals, speedup
from selfspec.report.statistics import best_of, summarise

# Two prompts: 1,000 tokens at 100 tokens/s in 250 rounds, 100 at 50 tokens/s in 50; the baseline does 40 on both.
WORKED = [
    timed_record("long", "draft", 1000, 250, 10.0),
    timed_record("short", "draft", 100, 50, 2.0),
    timed_record("long", "ar", 1000, 1000, 25.0),
    timed_record("short", "ar", 100, 100, 2.5),
]


def test_worked_example_has_two_acceptance_lengths_and_three_speedups():
    stats = summarise(WORKED)["methods"]["draft"]
    assert stats["al_pooled"] == pytest.approx(1100 / 300)  # 3.67
    assert stats["al_per_prompt_mean"] == pytest.approx(3.0)
    assert round(stats["al_pooled"], 2) == 3.67
    assert round(stats["speedup_total_time"], 2) == 2.29
    assert round(stats["speedup_ratio_of_means"], 3) == 1.875  # "1.88"
    assert round(stats["speedup_paired_geomean"], 2) == 1.77
    assert stats["tokens_per_s"] == pytest.approx(1100 / 12)
    assert stats["decode_tokens_per_s"] == pytest.approx(1100 / (0.9 * 12))


def test_ratio_of_summary_rates_is_the_total_time_speedup():
    methods = summarise(made_records())["methods"]
    ratio = methods["early_exit"]["tokens_per_s"] / methods["ar"]["tokens_per_s"]
    assert methods["early_exit"]["speedup_total_time"] == pytest.approx(ratio)


def test_the_median_over_repeats_ignores_one_slow_repeat():
    records = [timed_record("p", "ar", 10, 10, s, repeat=i) for i, s in enumerate([1.0, 9.0, 1.0])]
    assert estimators.tokens_per_s(records) == pytest.approx(10.0)


def test_speedup_uses_only_prompts_and_repeats_that_both_have():
    ours = [timed_record(name, "draft", 10, 5, 1.0) for name in ("a", "b")]
    ours += [timed_record("only_ours", "draft", 10, 5, 0.001), timed_record("a", "draft", 10, 5, 0.001, repeat=1)]
    baseline = [timed_record(name, "ar", 10, 10, 2.0) for name in ("a", "b", "only_baseline")]
    times_P4 = speedup.paired_times(ours, baseline)
    assert len(times_P4) == 2
    assert speedup.speedup_paired_geomean(times_P4) == pytest.approx(2.0)


def test_ar_against_itself_is_exactly_one():
    stats = summarise(made_records())["methods"]["ar"]
    for name in ("paired_geomean", "paired_geomean_low", "paired_geomean_high", "total_time", "total_time_low"):
        assert stats[f"speedup_{name}"] == 1.0
    assert stats["p_value"] == 1.0 and stats["p_value_holm"] is None


def test_same_records_give_the_same_digits_in_any_order():
    records = made_records()
    shuffled = records.copy()
    random.Random(1).shuffle(shuffled)
    assert summarise(shuffled) == summarise(records)


def test_no_baseline_gives_no_speedup_rather_than_a_wrong_one():
    stats = summarise([timed_record("a", "draft", 10, 5, 1.0)])["methods"]["draft"]
    assert stats["speedup_paired_geomean"] is None and stats["num_paired_prompts"] == 0
    assert stats["tokens_per_s"] == pytest.approx(10.0)


def test_one_prompt_gives_a_ratio_without_an_interval():
    records = [timed_record("a", "draft", 10, 5, 1.0), timed_record("a", "ar", 10, 10, 2.0)]
    stats = summarise(records)["methods"]["draft"]
    assert stats["speedup_paired_geomean"] == pytest.approx(2.0)
    assert stats["speedup_paired_geomean_low"] is None and stats["p_value"] is None


# ---- acceptance


def test_acceptance_by_position_counts_only_what_was_tested():
    # K = 3, accepted 0, 1, 3 and a round of K = 1 that accepted its only draft
    rounds = [made_record(emitted=[count], num_drafted=k).rounds[0] for count, k in [(1, 3), (2, 3), (4, 3), (2, 1)]]
    record = made_record(emitted=[1] * 9, rounds=rounds)
    assert estimators.joint_acceptance([record]) == [3 / 4, 1 / 4, 1 / 4]
    assert estimators.conditional_acceptance([record]) == [3 / 4, 1 / 2, 1 / 1]
    assert estimators.accepted_per_drafted([record]) == 5 / 10
    assert estimators.al_pooled([record]) == 1 + sum([3 / 4, 1 / 4, 1 / 4])


def test_a_position_never_tested_is_none_and_not_skipped():
    record = made_record(emitted=[1, 1], num_drafted=2)
    assert estimators.joint_acceptance([record]) == [0.0, 0.0]
    assert estimators.conditional_acceptance([record]) == [0.0, None]


def test_a_round_cut_short_counts_for_length_but_not_for_acceptance():
    record = made_record(emitted=[2, 3], num_drafted=4)
    record.rounds[-1].num_accepted = 4  # all four accepted, but the limit left room for three tokens
    assert estimators.al_pooled([record]) == 2.5
    assert estimators.joint_acceptance([record]) == [1.0, 0.0, 0.0, 0.0]


def test_alpha_is_pooled_over_positions_and_none_when_unmeasured():
    measured = [made_record("a", alpha_sum=9.0, alpha_count=10), made_record("b", alpha_sum=0.0, alpha_count=30)]
    assert estimators.alpha([*measured, made_record("c")]) == pytest.approx(9 / 40)
    assert estimators.alpha([made_record("c")]) is None


def test_phase_shares_sum_to_one_and_unseen_decode_time_is_other():
    record = made_record(emitted=[2, 2], num_drafted=2, decode_s=0.010, prefill_s=0.0, ttft_s=0.001)
    shares = estimators.phase_shares([record])
    assert shares == pytest.approx({"draft_share": 0.2, "verify_share": 0.4, "other_share": 0.4})
    assert set(estimators.phase_shares([made_record(rounds=[])]).values()) == {None}


def test_a_prompt_counts_by_its_worst_repeat_for_equality():
    same = {"equals_ar": True, "divergence_class": "identical"}
    records = [
        made_record("a", **same),
        made_record("a", repeat=1, equals_ar=False, divergence_class="near_tie"),
        made_record("b", **same),
        made_record("c", equals_ar=False),
        made_record("d"),
    ]
    assert estimators.equality(records) == {"identical": 1, "near_tie": 1, "mismatch": 1}
    assert estimators.equality([made_record("d")]) is None


# ---- uncertainty


def test_bootstrap_interval_covers_the_truth_as_often_as_it_says():
    """200 experiments of 40 prompts at a true ratio of 1.2: 95% intervals should cover 190 +- 3.1. A correct interval
    (percentile, slightly narrow: 94%) falls outside 176..199 with probability below 1e-3."""
    rng = np.random.default_rng(7)
    covered = 0
    for trial in range(200):
        logs = rng.normal(math.log(1.2), 0.25, 40)
        resampled = intervals.resample_counts(40, trial, 2000) @ logs / 40
        low, high = intervals.percentile_interval(resampled)
        covered += low <= 1.2 <= high
    assert 176 <= covered <= 199


def test_clustering_by_prompt_keeps_repeats_from_narrowing_the_interval():
    few = summarise(made_records(repeats=1))["methods"]["early_exit"]
    copied = [replace(record, repeat=repeat) for record in made_records(repeats=1) for repeat in range(3)]
    many = summarise(copied)["methods"]["early_exit"]
    assert many["speedup_paired_geomean_low"] == pytest.approx(few["speedup_paired_geomean_low"])
    assert many["p_value"] == few["p_value"]


def test_sign_flip_test_keeps_its_false_alarm_rate():
    """300 experiments without any effect: at level 0.05 more than 29 alarms have probability below 1e-3."""
    rng = np.random.default_rng(3)
    alarms = sum(intervals.sign_flip_p_value(rng.normal(0, 0.2, 20), seed, 999) < 0.05 for seed in range(300))
    assert 3 <= alarms <= 29
    assert intervals.sign_flip_p_value(rng.normal(0.3, 0.2, 20), 0, 999) < 0.01  # and it does see an effect


def test_minimum_detectable_speedup_matches_its_formula_and_shrinks_with_prompts():
    logs = np.tile([-0.25, 0.25], 40) * math.sqrt(79 / 80)  # SD 0.25 with ddof=1
    expected = math.exp((1.99045 + 0.84612) * 0.25 / math.sqrt(80))  # t quantiles for 79 degrees of freedom
    assert intervals.minimum_detectable_speedup(logs) == pytest.approx(expected, rel=1e-4)
    assert intervals.minimum_detectable_speedup(logs[:1]) is None


def test_holm_matches_the_textbook_and_never_reorders():
    assert intervals.holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06})
    assert intervals.holm({}) == {}


def test_best_of_a_sweep_pays_for_having_looked_at_all():
    methods = summarise(made_records())["methods"]
    best, ratio, p_value = best_of(methods)
    assert best == "typical_exit" and ratio == methods["typical_exit"]["speedup_paired_geomean"]
    assert p_value >= methods["typical_exit"]["p_value"] * 4 - 1e-12  # four candidates


def test_noise_check_is_quiet_on_a_quiet_machine_and_marks_a_drifting_one():
    assert summarise(made_records(repeats=1))["noise_check"] is None
    assert summarise(made_records(repeats=2))["noise_check"]["noisy"] is False
    drifting = [
        timed_record(f"p{i}", "ar", 10, 10, 1.0 + 0.2 * (r % 2) + i / 100, repeat=r) for i in range(8) for r in (0, 1)
    ]
    assert summarise(drifting)["noise_check"]["noisy"] is True


def test_categories_partition_the_prompts():
    summary = summarise(made_records())
    assert set(summary["categories"]) == {"chat", "code", "math"}
    per_category = [methods["early_exit"] for methods in summary["categories"].values()]
    assert sum(stats["num_prompts"] for stats in per_category) == summary["methods"]["early_exit"]["num_prompts"]


def test_the_baseline_measured_again_is_the_noise_check_and_no_row_of_its_own():
    records = made_records(repeats=1)
    again = [replace(r, method="ar_again", total_s=r.total_s * 1.001, decode_s=r.decode_s + r.total_s * 0.001)
             for r in records if r.method == "ar"]  # fmt: skip
    even = [replace(r, total_s=t, decode_s=t - r.prefill_s) for i, r in enumerate(again)
            for t in [r.total_s * (1.01 if i % 2 else 0.99)]]  # fmt: skip
    quiet = summarise(records + even)
    assert quiet["noise_check"]["noisy"] is False and "ar_again" not in quiet["methods"]
    slower = [replace(r, total_s=1.05 * r.total_s, decode_s=1.05 * r.total_s - r.prefill_s) for r in even]
    noisy = summarise(records + slower)["noise_check"]
    assert noisy["noisy"] is True and noisy["speedup_paired_geomean_high"] < 1.0
    assert noisy["speedup_paired_geomean"] == pytest.approx(quiet["noise_check"]["speedup_paired_geomean"] / 1.05)
