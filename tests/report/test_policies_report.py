"""The table of policies and the figures over K, exit layer and prediction, from runs whose answers are known."""

from __future__ import annotations

import csv
import io
import json

import numpy as np
import pytest
from made_policies import DRAFTERS, LOOKAHEADS, STEP_S, write_policies
from made_runs import made_records, write_run
from matplotlib.image import imread

from selfspec.errors import UserError
from selfspec.report.build import build_report
from selfspec.report.figures import all_figures, to_bytes
from selfspec.report.figures_costs import predicted_figure, predictions
from selfspec.report.figures_lookahead import exit_cells, exit_layer_figure, lookahead_figure, oracle_speedup
from selfspec.report.lookaheads import groups_of, shared_name
from selfspec.report.oracle import decode_rate, round_costs_s
from selfspec.report.policies import oracle_of, policies_csv, policy_table, reached
from selfspec.report.runs import load_runs


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return write_policies(tmp_path_factory.mktemp("outputs") / "policies-0123abcd")


@pytest.fixture(scope="module")
def runs(run_dir):
    return load_runs(run_dir)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    return load_runs(
        [
            write_policies(
                folder / f"sweep-0000{layer}{k:02d}",
                {"early_exit": {"kind": "early_exit", "exit_layer": layer}},
                num_prompts=3,
                lookahead={"kind": "fixed", "num_drafted": k},
            )
            for layer, k in ((14, 1), (14, 2), (22, 1))
        ]
    )


def test_methods_are_grouped_by_their_drafter_and_named_by_the_rest(runs):
    groups = groups_of(runs[0])
    assert [group.name for group in groups] == list(DRAFTERS)
    for group in groups:
        assert [method.policy for method in group.methods] == [
            "K = 1", "K = 2", "K = 3", "K = 5", "heuristic", "expected_gain"
        ]  # fmt: skip
        assert list(group.by_k) == [1, 2, 3, 5]
    assert shared_name(["exit_adapter_k1", "exit_adapter_k2"]) == "exit_adapter"
    assert shared_name(["eagle3", "eagle3_tree"]) == "eagle3" and shared_name(["a_1", "b_1"]) == "a_1/b_1"


def test_the_costs_of_rounds_are_the_runs_own_and_lie_on_lines_in_between(runs):
    group = groups_of(runs[0])[0]
    baseline = [record for record in runs[0].run.prompts if record.method == "ar"]
    costs = round_costs_s(baseline, {k: method.records for k, method in group.by_k.items()})
    assert costs == pytest.approx([STEP_S * DRAFTERS["eagle3"][1](k) for k in range(6)], rel=0.01)
    with pytest.raises(UserError, match="needs a drafter with a fixed lookahead"):
        round_costs_s(baseline, {})


def test_no_policy_reaches_more_than_the_oracle_and_the_best_fixed_k_is_the_best(runs):
    for row in reached(runs[0]):
        assert 0.3 < row.share_of_oracle < 1.0
        assert row.share_of_oracle == pytest.approx(decode_rate(row.method.records) / oracle_of(row.group))
        assert row.is_best_fixed == (row.versus_fixed is None)
        if row.method.fixed is not None and not row.is_best_fixed:
            assert row.versus_fixed[0] <= 1.0
    best = {row.group.name: row.method.fixed for row in reached(runs[0]) if row.is_best_fixed}
    assert best["early_exit"] == 1 and best["eagle3"] == 2


def test_drafts_that_look_further_than_the_longest_k_and_trees_have_no_bound(tmp_path):
    options = {"kind": "ngram"}
    drafters = {
        "ngram_k2": {**options, "lookahead": 2},
        "ngram_far": {**options, "lookahead": LOOKAHEADS["heuristic"]},
        "ngram_tree": {**options, "lookahead": {"kind": "tree", "branches": [1, 1]}},
        "wrong_expected_gain": {"kind": "early_exit", "lookahead": LOOKAHEADS["expected_gain"]},
    }
    rows = {row.method.label: row for row in reached(*load_runs(write_policies(tmp_path / "p-0123abcd", drafters)))}
    assert rows["ngram_k2"].share_of_oracle is not None
    assert [rows[label].share_of_oracle for label in ("ngram_far", "ngram_tree")] == [None, None]
    assert rows["ngram_tree"].versus_fixed is not None
    alone = rows["wrong_expected_gain"]
    assert alone.group.name == "wrong" and alone.share_of_oracle is None and alone.versus_fixed is None


def test_the_table_says_what_the_records_say_in_every_form(run_dir, runs, tmp_path, capsys):
    files = build_report(run_dir, "policies", tmp_path / "one")
    again = build_report(run_dir, ["policies"], tmp_path / "two")
    assert [path.name for path in files] == ["policies.md", "policies.tex", "policies.csv"]
    assert [path.read_bytes() for path in files] == [path.read_bytes() for path in again]
    assert "share of" in capsys.readouterr().out
    lines = list(csv.DictReader(io.StringIO(policies_csv(runs))))
    assert len(lines) == len(DRAFTERS) * len(LOOKAHEADS)
    row = next(row for row in reached(runs[0]) if row.method.label == "eagle3_expected_gain")
    line = next(line for line in lines if line["method"] == "eagle3_expected_gain")
    assert float(line["share_of_oracle"]) == row.share_of_oracle and line["num_drafted"] == ""
    table = policy_table(runs)
    assert [block.label for block in table.blocks] == list(DRAFTERS)
    ratio, low, high = row.versus_fixed
    assert table.blocks[0].rows[5][4:] == [f"{row.share_of_oracle:.0%}", f"{ratio:.3f} [{low:.3f}, {high:.3f}]"]
    assert "policies-0123abcd" in table.notes and "drafters with lookaheads of their own" in table.caption


def test_runs_that_compare_no_lookaheads_are_told_what_to_measure(tmp_path):
    folder = write_run(tmp_path / "quick-0123abcd", made_records(3, 1))
    with pytest.raises(UserError, match="compare no lookaheads"):
        build_report(folder, "policies", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert "policies.md" not in {path.name for path in build_report(folder, "all", tmp_path / "all")}


def test_the_oracle_of_the_figure_is_above_every_curve(runs):
    figure = lookahead_figure(runs)
    for axes, group in zip(figure.axes, groups_of(runs[0]), strict=True):
        curve = axes.lines[1]
        assert list(curve.get_xdata()) == [0, 1, 2, 3, 5] and curve.get_ydata()[0] == 1.0
        assert max(curve.get_ydata()) < oracle_speedup(group)


def test_lossy_and_scripted_acceptance_is_marked_in_every_figure(run_dir, sweep):
    (run,) = load_runs(run_dir)
    for stats in run.summary["methods"].values():
        stats["lossy"] = True
    assert [axes.get_title() for axes in lookahead_figure([run]).axes] == [f"{name}†" for name in DRAFTERS]
    for item in sweep:
        item.summary["methods"]["early_exit"]["synthetic"] = True
    try:
        assert list(exit_cells(sweep)) == ["early_exit‡"]
    finally:
        for item in sweep:
            item.summary["methods"]["early_exit"]["synthetic"] = False


def test_the_map_of_exit_layers_comes_from_the_runs_of_a_sweep(sweep):
    (cells,) = exit_cells(sweep).values()
    assert set(cells) == {(14, 1), (14, 2), (22, 1)}
    measured = {(run.run.config["drafters"]["early_exit"]["exit_layer"], run.run.config["lookahead"]["num_drafted"]):
                run.summary["methods"]["early_exit"]["speedup_paired_geomean"] for run in sweep}  # fmt: skip
    assert cells == pytest.approx(measured)
    shown = [text.get_text() for text in exit_layer_figure(sweep).axes[0].texts]
    assert shown == [f"{cells[14, 1]:.2f}", f"{cells[14, 2]:.2f}", f"{cells[22, 1]:.2f}", "—"]


def test_predictions_are_the_summarys_and_measured_is_of_decoding(runs):
    points = predictions(runs)
    assert len(points) == len(DRAFTERS) * len(LOOKAHEADS) and {name for name, *_ in points} == set(DRAFTERS)
    costs = json.loads((runs[0].run.path / "summary.json").read_text())["costs"]["methods"]["eagle3_k1"]
    methods = runs[0].summary["methods"]
    ratio = methods["eagle3_k1"]["decode_tokens_per_s"] / methods["ar"]["decode_tokens_per_s"]
    assert points[0] == ("eagle3", pytest.approx(ratio), costs["speedup_model"])


def test_the_figure_of_predictions_shows_nothing_that_was_made_from_the_time_it_is_compared_with(tmp_path):
    """`speedup_simple` is the measured speedup again: its marks would all lie on the diagonal, whatever the model."""
    folder = write_policies(tmp_path / "policies-0123abcd")
    summary = json.loads((folder / "summary.json").read_text())
    for label, own in summary["costs"]["methods"].items():
        own["speedup_model"], own["speedup_simple"] = (None if label.startswith("ngram") else 3.5), 0.5
    (folder / "summary.json").write_text(json.dumps(summary))
    runs = load_runs(folder)
    axes = predicted_figure(runs).axes[0]
    marks = {line.get_label(): list(line.get_ydata()) for line in axes.lines[1:]}
    assert marks == {name: [3.5] * len(LOOKAHEADS) for name in DRAFTERS if name != "ngram"}
    for own in summary["costs"]["methods"].values():
        own["speedup_model"] = None
    (folder / "summary.json").write_text(json.dumps(summary))
    assert "predicted" not in all_figures(load_runs(folder))


def test_figures_keep_to_greys_reach_no_border_and_are_the_same_when_made_again(runs, sweep):
    figures = {name: (make, runs) for name, make in all_figures(runs).items()}
    assert set(figures) == {"speedup", "acceptance", "time", "lookahead", "predicted"}
    assert "exit_layers" in all_figures(sweep)
    figures["exit_layers"] = (exit_layer_figure, sweep)
    for name in ("lookahead", "predicted", "exit_layers"):
        make, of = figures[name]
        png = to_bytes(make(of), "png")
        pixels = imread(io.BytesIO(png))[:, :, :3]
        grey = pixels.mean(axis=2)
        assert np.ptp(pixels, axis=2).max() < 1e-6, name
        assert np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]]).min() == 1.0, f"{name} is cut off"
        assert to_bytes(make(of), "png") == png, name
    make, of = figures["lookahead"]
    assert to_bytes(make(of), "pdf") == to_bytes(make(of), "pdf")


def test_acceptance_shows_a_drafter_once_by_its_longest_fixed_k(runs):
    titles = [axes.get_title() for axes in all_figures(runs)["acceptance"](runs).axes if axes.get_visible()]
    assert titles == ["eagle3_k5", "early_exit_k5", "ngram_k5"]
