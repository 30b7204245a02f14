"""A table must not flatter: times that do not count, tokens that are not the target's, few prompts, runs mixed up."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from made_policies import write_policies
from made_runs import made_records, timed_record, write_run

from selfspec.errors import UserError
from selfspec.records import PromptRecord
from selfspec.report.build import build_report
from selfspec.report.costs import cost_table
from selfspec.report.figures import all_figures
from selfspec.report.policies import policy_table
from selfspec.report.runs import Measured, load_runs
from selfspec.report.sweep import sweep_table
from selfspec.report.tables import DASH, Table, category_table, comparison_table, to_csv


def configured(path: Path, **changes: Any) -> Path:
    """The run with this in its config."""
    config = yaml.safe_load((path / "config.yaml").read_text())
    (path / "config.yaml").write_text(json.dumps({**config, **changes}))
    return path


def cells_of(table: Table) -> str:
    return " ".join(cell for block in table.blocks for row in block.rows for cell in row)


@pytest.fixture(scope="module")
def untimed(tmp_path_factory: pytest.TempPathFactory) -> list[Measured]:
    path = write_policies(tmp_path_factory.mktemp("untimed") / "untimed-0123abcd")
    return load_runs(configured(path, measure={"timed": False}))


def test_no_table_shows_a_time_of_an_untimed_run(untimed: list[Measured]):
    methods = len(untimed[0].summary["methods"]) - 1
    assert cells_of(category_table(untimed)).count(DASH) >= methods * 2, "each category, and overall"
    assert not re.search(r"\d\.\d\d \[", cells_of(comparison_table(untimed)) + cells_of(category_table(untimed)))
    assert not re.search("Smallest speedup|FEW PROMPTS", " ".join(comparison_table(untimed).notes))
    head, *lines = to_csv(untimed).splitlines()
    rates = [line.split(",")[head.split(",").index("speedup_paired_geomean")] for line in lines]
    assert set(rates) == {""}


def test_nothing_is_chosen_or_drawn_by_the_times_of_an_untimed_run(untimed: list[Measured]):
    with pytest.raises(UserError, match=r"untimed-0123abcd was measured with measure\.timed=false.*Measure it timed"):
        sweep_table(untimed)
    with pytest.raises(UserError, match=r"untimed \(measure\.timed=false\)"):
        policy_table(untimed)
    assert list(all_figures(untimed)) == ["acceptance"]


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> list[Measured]:
    """early_exit gave tokens that are not AR's."""
    records = made_records()
    for record in records:
        if record.method == "early_exit":
            record.token_ids[-1] += 1
            record.equals_ar, record.divergence_class = False, "mismatch"
    return load_runs(write_run(tmp_path_factory.mktemp("wrong") / "wrong-0123abcd", records))


@pytest.mark.parametrize("make", [comparison_table, category_table, sweep_table])
def test_every_table_marks_tokens_that_are_not_the_targets_and_lossy_and_scripted_rules(wrong, make):
    table = make(wrong)
    names = {row[0] for row in table.blocks[0].rows}
    assert {"early_exit!", "typical_exit†", "synthetic_80‡"} <= names
    assert {note[0] for note in table.notes} >= {"!", "†", "‡"}


def quick(num_prompts: int, factor: float) -> list[PromptRecord]:
    """A draft that is faster by about this factor on every prompt."""
    return [
        timed_record(f"p{i}", method, 60, rounds, seconds * (1 + 0.01 * i))
        for i in range(num_prompts)
        for method, rounds, seconds in (("ar", 60, 2.0), ("exit", 25, 2.0 / (factor + 0.01 * i)))
    ]


def test_three_prompts_cannot_show_that_a_setting_pays_and_twelve_can(tmp_path: Path):
    few = sweep_table(load_runs(write_run(tmp_path / "few-0123abcd", quick(3, 1.5))))
    many = sweep_table(load_runs(write_run(tmp_path / "many-0123abcd", quick(12, 1.5))))
    assert "exit, which does not clearly pay" in few.notes[0] and "p = 0." in few.notes[0]
    assert "exit, which pays" in many.notes[0]


def test_few_prompts_are_said_to_make_intervals_too_narrow(tmp_path: Path):
    few = comparison_table(load_runs(write_run(tmp_path / "few-0123abcd", quick(4, 1.5))))
    many = comparison_table(load_runs(write_run(tmp_path / "many-0123abcd", quick(12, 1.5))))
    assert any(note.startswith("FEW PROMPTS (4)") for note in few.notes)
    assert not any(note.startswith("FEW PROMPTS") for note in many.notes)


def drifting(num_prompts: int = 12) -> list[PromptRecord]:
    again = [timed_record(f"p{i}", "ar_again", 60, 60, 2.6 * (1 + 0.01 * i)) for i in range(num_prompts)]
    return [*quick(num_prompts, 1.5), *again]


def test_a_caption_that_says_noisy_see_below_has_it_below(tmp_path: Path):
    path = write_run(tmp_path / "noisy-0123abcd", drifting())
    summary = json.loads((path / "summary.json").read_text())
    own = dict.fromkeys(
        ("num_drafted", "tau", "c_predicted", "c_measured", "v_measured", "speedup_simple", "speedup_model"), 1.0
    )
    own |= {"break_even_alpha": None, "round_s_per_token": 0.01}
    summary["costs"] = {
        "methods": {"exit": own}, "read_bytes_per_s": 1e9, "limit_tokens_per_s": 9.0, "step_bytes": 1e6, "context": 9,
        "bandwidth_share": 0.5, "ar_s_per_token": 0.01,
    }  # fmt: skip
    (path / "summary.json").write_text(json.dumps(summary))
    runs = load_runs(path)
    for table in (comparison_table(runs), category_table(runs), sweep_table(runs), cost_table(runs)):
        assert table.caption.startswith("NOISY") and "see below" in table.caption
        assert any(note.startswith("AR against AR") and "NOISY" in note for note in table.notes), table.name


def test_two_runs_of_one_name_stay_two(tmp_path: Path):
    """A folder of runs copied from two machines: neither's numbers, nor its trace page, may stand for the other's."""
    trace = {"schema_version": 1, "prompt_id": "p0", "method": "exit", "prompt_text": "x", "rounds": []}
    for place, factor in (("lab", 1.5), ("home", 3.0)):
        path = write_run(tmp_path / place / "quick-0123abcd", quick(12, factor))
        (path / "traces.jsonl").write_text(json.dumps(trace) + "\n")
    folders = [tmp_path / place / "quick-0123abcd" for place in ("lab", "home")]
    runs = load_runs(folders, allow_mixed=True)
    assert [block.label for block in comparison_table(runs).blocks] == ["lab/quick-0123abcd", "home/quick-0123abcd"]
    settings = [row[:2] for row in sweep_table(runs).blocks[0].rows]
    assert [name for name, _ in settings] == ["exit (home/quick)", "exit (lab/quick)"]
    files = build_report(folders, "trace", tmp_path / "out", allow_mixed=True)
    assert sorted(file.name for file in files) == ["trace-home_quick-0123abcd.html", "trace-lab_quick-0123abcd.html"]


def test_runs_of_one_table_say_which_drafter_options_and_prompts_set_them_apart(tmp_path: Path):
    paths = []
    for layer, prompts in ((2, "selfspec48"), (3, "mine.jsonl")):
        path = write_run(tmp_path / f"quick-0123abc{layer}", quick(12, 1.5), config_hash=f"0123abc{layer}")
        drafters = {"exit": {"kind": "early_exit", "exit_layer": layer}}
        paths.append(configured(path, drafters=drafters, prompts={"name": prompts, "limit": None}))
    caption = comparison_table(load_runs(paths)).caption
    for layer, prompts in ((2, "selfspec48"), (3, "mine.jsonl")):
        assert f"quick-0123abc{layer}: prompts.name {prompts}; drafters.exit.exit_layer {layer}." in caption
    assert "limit" not in caption and "kind" not in caption


def test_a_category_called_overall_does_not_take_the_place_of_the_whole(tmp_path: Path):
    records = quick(12, 1.5)
    for record in records:
        record.category = "overall" if record.prompt_id < "p2" else ""
    runs = load_runs(write_run(tmp_path / "odd-0123abcd", records))
    lines = [line for line in to_csv(runs).splitlines() if ",exit," in line]
    assert len(lines) == 3 and ",12," in lines[0], "the whole, and two categories"
