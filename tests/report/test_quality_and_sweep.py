"""Quality beside speed, and the best of many settings without a winner's luck."""

from __future__ import annotations

import random

import numpy as np
import pytest
from made_runs import made_record, made_records, timed_record, write_run

from selfspec.errors import UserError
from selfspec.report.build import build_report
from selfspec.report.figures import speedup_figure
from selfspec.report.quality import exact_number, last_number, rouge_l
from selfspec.report.runs import load_runs
from selfspec.report.statistics import summarise
from selfspec.report.sweep import candidates, simultaneous_band, sweep_table
from selfspec.report.tables import comparison_table


def test_rouge_l_of_known_pairs():
    assert rouge_l("police killed the gunman", "police kill the gunman") == 0.75  # Lin 2004, section 3.1
    assert rouge_l("the gunman kill police", "police kill the gunman") == 0.5
    assert rouge_l("The cat.", "the CAT") == 1.0 and rouge_l("", "") == 1.0 and rouge_l("", "a") == 0.0


def test_the_last_number_decides():
    assert last_number("First 3, then 1,250.50 dollars.") == 1250.5
    assert exact_number("So 7 boxes make 42.", "6 * 7 = 42 #### 42") == 1.0
    assert exact_number("It is 41", "#### 42") == exact_number("none", "#### 42") == exact_number("4", "four") == 0.0


def test_answers_are_scored_one_vote_per_prompt_and_lossy_ones_against_ar():
    answers = {"ar": ("it is 4", "it is 9"), "typical": ("it is 4", "it was 5")}
    records = [
        made_record(prompt, method, text=text, lossy=method == "typical")
        for method, texts in answers.items()
        for prompt, text in zip(("p0", "p1"), texts, strict=True)
    ]
    methods = summarise(records, references={"p0": "#### 4", "p1": "#### 9"}, score="exact_number")["methods"]
    assert methods["ar"]["reference_score"] == 1.0 and methods["typical"]["reference_score"] == 0.5
    assert methods["typical"]["rouge_l_to_baseline"] == pytest.approx((1 + 1 / 3) / 2)
    assert methods["ar"]["rouge_l_to_baseline"] is None
    with pytest.raises(UserError, match="Allowed: rouge_l, exact_number"):
        summarise(records, references={"p0": "4"}, score="bleu")


def test_the_table_shows_quality_only_where_there_is_some(tmp_path):
    plain = [record for record in made_records(4, 1) if not record.lossy]
    assert "score" not in comparison_table(load_runs(write_run(tmp_path / "a-0000000a", plain))).header
    run = write_run(
        tmp_path / "b-0000000b", made_records(4, 1), prompt_set={"p00": ("report", "made")}, score="rouge_l"
    )
    table = comparison_table(load_runs(run))
    assert table.header[-2:] == ["score", "ROUGE-L\nto AR"]
    cells = {row[0]: row[-2:] for row in table.blocks[0].rows}
    assert cells["typical_exit†"] == ["1.00", "1.00"] and cells["early_exit"] == ["1.00", "—"]
    assert any(note.startswith("score: rouge_l") for note in table.notes)


# ---- the best of many


def settings(rng, num_settings=4, num_prompts=24, best=1.0):
    """Settings that are all as fast as AR, but for the first, on clocks with 5% noise."""
    records = [timed_record(f"p{i:02d}", "ar", 40, 40, 2.0) for i in range(num_prompts)]
    for m in range(num_settings):
        for i in range(num_prompts):
            total_s = 2.0 / (best if m == 0 else 1.0) * rng.lognormvariate(0.0, 0.05)
            records.append(timed_record(f"p{i:02d}", f"k{m}", 40, 20, total_s))
    return records


def test_the_band_covers_all_settings_at_once_where_single_intervals_do_not():
    """150 sweeps of 8 settings that gain nothing: the band should miss 1 in about 5% of them, a single one far more."""
    rng = np.random.default_rng(0)
    missed = single_missed = 0
    for seed in range(150):
        logs_PM = rng.normal(0.0, 0.05, (24, 8))
        low_M, high_M = simultaneous_band(logs_PM, seed, resamples=200)
        missed += bool(((low_M > 0) | (high_M < 0)).any())
        each = [simultaneous_band(logs_PM[:, m : m + 1], seed, resamples=200) for m in range(8)]
        single_missed += any(low[0] > 0 or high[0] < 0 for low, high in each)
    assert missed <= 21  # 5% nominal, bootstrap intervals of 24 prompts a little more: 14% would be p < 1e-4
    assert single_missed > 2 * missed


def test_the_best_setting_comes_first_and_is_said_to_pay_only_if_it_does(tmp_path):
    rng = random.Random(1)
    good = load_runs(write_run(tmp_path / "good-0000000a", settings(rng, best=1.2)))
    assert candidates(good)[0].name == "k0" and candidates(good)[0].low > 1
    assert sweep_table(good).notes[0].startswith("Best: k0, which pays")
    luck = load_runs(write_run(tmp_path / "luck-0000000b", settings(random.Random(3))))
    assert "does not clearly pay" in sweep_table(luck).notes[0]


def test_a_setting_of_several_runs_is_called_as_in_the_figures(tmp_path):
    paths = [
        write_run(tmp_path / f"{name}-{digits}", made_records(4, 1), config_hash=digits)
        for name, digits in (("k", "0000000a"), ("k", "0000000b"), ("t", "0000000c"))
    ]
    runs = load_runs(paths)
    runs_named = {name.partition(" ")[2] for name in (one.name for one in candidates(runs))}
    assert runs_named == {"(k-0000000a)", "(k-0000000b)", "(t)"}
    assert runs_named == {label.partition(" ")[2] for label in speedup_rows(runs)}
    assert not any("(" in one.name for one in candidates(runs[:1]))


def speedup_rows(runs):
    """The rows of the speedup figure."""
    return [text.get_text() for text in speedup_figure(runs).axes[0].get_yticklabels()]


def test_nothing_to_choose_from_is_an_error(tmp_path):
    alone = [record for record in made_records(4, 1) if record.method in ("ar", "hf_generate")]
    with pytest.raises(UserError, match="nothing to choose from"):
        sweep_table(load_runs(write_run(tmp_path / "a-0000000a", alone)))


def test_runs_on_tuning_prompts_are_refused_for_tables_and_serve_for_choosing(tmp_path):
    splits = {f"p{i:02d}": ("tune", None) for i in range(4)}
    run = write_run(tmp_path / "a-0000000a", made_records(4, 1), prompt_set=splits)
    with pytest.raises(UserError, match=r"a-0000000a was measured on prompts for choosing .*prompts.split=report"):
        build_report(run, "latex", tmp_path / "out")
    (path,) = build_report(run, "sweep", tmp_path / "out")
    assert "tuning prompts" in load_runs(run, allow_tuning=True)[0].label
    assert path.read_text().count("| early\\_exit") <= 1 and "early_exit" in path.read_text()
    half = {**splits, "p03": ("report", None)}
    assert load_runs(write_run(tmp_path / "b-0000000b", made_records(4, 1), prompt_set=half))
