"""What the tuner's table says of runs with known answers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from made_runs import timed_record, write_run

from selfspec.errors import UserError
from selfspec.records import read_run
from selfspec.report.render import to_markdown
from selfspec.report.runs import Measured, measured
from selfspec.report.tuning import ranked, tuned, tuning_table


def made(folder: Path, speedups: dict[str, float], prompts: str, spread: float = 0.01) -> Measured:
    """AR takes two seconds for 60 tokens of each of 12 prompts; the others as much less as is said."""
    rng, records = random.Random(1), []
    for index in range(12):
        for method, speedup in {"ar": 1.0, **speedups}.items():
            total_s = 2.0 / speedup * rng.lognormvariate(0.0, spread * (method != "ar"))
            num_rounds = 60 if method == "ar" else 30
            records.append(timed_record(f"{prompts}{index:02d}", method, 60, num_rounds, total_s))
    return measured(read_run(write_run(folder, records)))


def test_the_fastest_on_tuning_prompts_is_chosen_and_judged_on_others(tmp_path: Path) -> None:
    run = made(tmp_path / "run", {"a": 1.1, "b": 1.4, "c": 1.3}, "t")
    confirmed = made(tmp_path / "confirm", {"b": 1.2, "c": 1.25}, "r")
    assert ranked(run) == ["b", "c", "a"]
    result = tuned({"ar": 30.0, "a": 36.3, "b": 42.0, "c": 42.9}, run, confirmed)
    assert result.chosen == "b", "not c, which was faster where nothing may be chosen"
    assert [row.label for row in result.rows] == ["b", "c", "a", "ar"]
    b = result.rows[0]
    assert b.confirmed is not None and b.confirmed.low < 1.2 < b.confirmed.high < 1.3
    assert b.tuning is not None and b.tuning.speedup == pytest.approx(1.4, rel=0.02)
    assert result.rows[2].confirmed is None
    found = result.as_dict()["prediction_error"]
    assert found["num_candidates"] == 3, "AR was not predicted"
    assert found["median_abs_relative"] == pytest.approx(0.1, abs=0.02)
    assert found["max_abs_relative"] == max(result.errors) == pytest.approx(0.1, abs=0.02)
    text = to_markdown(tuning_table(result, run, confirmed, 40))
    assert "Chosen: b, which pays on other prompts" in text
    assert "40 candidates were predicted and 3 of them run" in text
    assert text.count("| chosen |") == 1


def test_no_draft_is_chosen_where_none_is_faster(tmp_path: Path) -> None:
    run, confirmed = made(tmp_path / "run", {"a": 0.8}, "t"), made(tmp_path / "confirm", {"a": 1.2}, "r")
    result = tuned({"ar": 30.0, "a": 24.0}, run, confirmed)
    assert result.chosen == "ar" and [row.chosen for row in result.rows] == [False, True]
    assert "Chosen: no draft" in to_markdown(tuning_table(result, run, confirmed, 1))


def test_a_winner_whose_band_holds_one_is_not_said_to_pay(tmp_path: Path) -> None:
    run = made(tmp_path / "run", {"a": 1.3}, "t")
    lucky = made(tmp_path / "lucky", {"a": 1.2}, "r", spread=0.3)
    worse = made(tmp_path / "worse", {"a": 0.8}, "r")
    predicted = {"ar": 30.0, "a": 39.0}
    assert "does not clearly pay" in to_markdown(tuning_table(tuned(predicted, run, lucky), run, lucky, 1))
    assert "which does not pay" in to_markdown(tuning_table(tuned(predicted, run, worse), run, worse, 1))


def test_what_was_measured_to_predict_is_no_prediction(tmp_path: Path) -> None:
    run, confirmed = made(tmp_path / "run", {"a": 1.2, "b": 1.4}, "t"), made(tmp_path / "confirm", {"b": 1.4}, "r")
    run.summary["methods"]["a"]["lossy"] = True
    predicted = {"ar": 30.0, "a": 46.8, "b": 42.0}
    result = tuned(predicted, run, confirmed, probed=["b"])
    assert result.errors == [pytest.approx(0.3, abs=0.02)], "b's own rounds said how fast it is"
    assert [row["probed"] for row in result.as_dict()["candidates"]] == [True, False, False]
    text = to_markdown(tuning_table(result, run, confirmed, 5))
    assert "2 of them run. Prediction error: median 30" in text and "over the 1 whose own rounds" in text
    assert "a†" in text and "† lossy" in text and "‡" not in text
    every = tuned(predicted, run, confirmed, probed=["a", "b"])
    assert every.as_dict()["prediction_error"]["median_abs_relative"] is None
    assert "Prediction error: not known" in to_markdown(tuning_table(every, run, confirmed, 5))


def test_a_prompt_of_both_runs_is_refused(tmp_path: Path) -> None:
    run, confirmed = made(tmp_path / "run", {"a": 1.3}, "t"), made(tmp_path / "confirm", {"a": 1.3}, "t")
    with pytest.raises(UserError, match="prompt 't00' was measured in"):
        tuned({"ar": 30.0, "a": 39.0}, run, confirmed)
