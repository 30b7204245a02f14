"""The tuner end to end on a tiny random target: what it runs and leaves behind, how it goes on, what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

import selfspec.run
from selfspec.config import CompareConfig, conf_dir, resolve
from selfspec.errors import UserError
from selfspec.records import read_run
from selfspec.tuning import costs as tuning_costs
from selfspec.tuning import tuner
from selfspec.tuning.costs import costs_file
from selfspec.tuning.grid import candidates_of
from selfspec.tuning.settings import TuneConfig, checked, comparison

TINY = [
    "target=random-tiny", "runtime=cpu_float32", "measure=smoke", "measure.noise_check=false", "drafters=[exit,ngram]",
    "+candidates.exit={kind: early_exit, sweep: {exit_layer: [2, 3], tree_nodes: [4]}}", "grid.num_drafted=[1,2,3]",
    "grid.tree_nodes=[]", "grid.policies=[]", "candidates.ngram.sweep.num_drafted=[1,2]", "top=2", "num_confirmed=2",
    "prompts.limit=2", "confirm.limit=2", "max_new_tokens=6",
]  # fmt: skip


def config_of(*overrides: str) -> Any:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return resolve(TuneConfig, compose("tune", list(overrides)))


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Any]:
    return lambda *more: tuner.run_tuner(config_of(*TINY, f"output_dir={tmp_path}", *more))


def keys(folder: Path) -> list[tuple[str, str, int]]:
    lines = map(json.loads, (folder / "prompts.jsonl").read_text().splitlines())
    return [(entry["prompt_id"], entry["method"], entry["repeat"]) for entry in lines]


def test_killed_in_the_middle_it_goes_on_and_runs_only_what_is_promising(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def killed(tracker: object, record: object) -> None:
        begun = next(tmp_path.glob("tune/tune-candidates-*/prompts.jsonl"), None)
        if begun is not None and len(begun.read_text().splitlines()) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(selfspec.run, "log_result", killed)
    with pytest.raises(KeyboardInterrupt):
        run()
    monkeypatch.undo()
    (rounds,), (candidates,) = (list(tmp_path.glob(f"tune/tune-{step}-*")) for step in ("rounds", "candidates"))
    survived = (candidates / "prompts.jsonl").read_bytes()
    measured, costs = (rounds / "prompts.jsonl").read_bytes(), next(tmp_path.glob("tune/costs-*.json")).read_bytes()
    assert not (tmp_path / "tune" / "tuned").exists(), "nothing is half-written"

    monkeypatch.setattr(tuning_costs, "measure_costs", lambda *a: pytest.fail("measured costs that are there"))
    result = run()
    assert (rounds / "prompts.jsonl").read_bytes() == measured
    assert next(tmp_path.glob("tune/costs-*.json")).read_bytes() == costs
    assert (candidates / "prompts.jsonl").read_bytes().startswith(survived)
    assert len(keys(candidates)) == len(set(keys(candidates)))

    out = tmp_path / "tune" / "tuned"
    found = json.loads((out / "tune.json").read_text())
    predicted = [one["label"] for one in found["predicted"]]  # fastest first
    wanted = {
        *predicted[:2],
        *(next(name for name in predicted if name.startswith(drafter)) for drafter in ("exit", "ngram")),
    }
    ran = {method for _, method, _ in keys(candidates)} - {"ar", "hf_generate"}
    assert ran == wanted and len(ran) < len(predicted)
    assert len(predicted) >= 8, "2 exits, each with 3 chains, and 2 chains of copies"
    probed = {method for _, method, _ in keys(rounds)} - {"ar", "hf_generate"}
    assert {"exit-exit_layer_2.K1", "exit-exit_layer_2.K3", "ngram.K1", "ngram.K2"} <= probed
    assert "exit-exit_layer_2.K2" not in probed, "what lies between is predicted"

    (confirm,) = tmp_path.glob("tune/tune-confirm-*")
    assert {split for split in prompt_splits(confirm)} == {"report"} and prompt_splits(rounds) == {"tune"}
    assert {prompt for prompt, _, _ in keys(confirm)}.isdisjoint(prompt for prompt, _, _ in keys(candidates))
    assert found["runs"] == {"rounds": str(rounds), "run": str(candidates), "confirm": str(confirm)}
    assert result.chosen == found["chosen"] and found["chosen"] in {*ran, "ar"}
    printed = capsys.readouterr().out
    assert "1/4 costs" in printed and "4/4 confirm" in printed and "experiment=tuned" in printed
    assert (out / "tune.md").read_text().count("| chosen |") == 1

    monkeypatch.setattr(tuner, "measure_into", lambda *a: pytest.fail("measured what is there"))
    assert run() == result
    check_winner_is_usable(out, found["winner"])


def prompt_splits(folder: Path) -> set[str]:
    return {entry["split"] for entry in read_run(folder).prompt_set.values()}


def check_winner_is_usable(out: Path, winner: dict[str, Any]) -> None:
    """As `--config-dir` does it: the folder is one more place that Hydra looks in."""
    searched = f"hydra.searchpath=[file://{out}]"
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = resolve(CompareConfig, compose("compare", [searched, "experiment=tuned"]))
        alone = compose("generate", [searched, "drafter=tuned", "lookahead=tuned", "prompt=x"])
    assert config.target.kind == "random" and config.runtime.dtype == "float32"
    assert config.tuned_on == ["selfspec_tune24"]
    drafters = [{**winner["drafter"], "lookahead": winner["lookahead"]}] if winner["drafter"]["kind"] != "none" else []
    assert list(config.drafters.values()) == drafters
    assert alone.drafter == winner["drafter"] and alone.lookahead == winner["lookahead"]


def test_a_forced_run_measures_costs_again(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning_costs, "measure_costs", lambda *a: (_ for _ in ()).throw(UserError("measured")))
    with pytest.raises(UserError, match="measured"):
        run("force=true")


def test_costs_of_a_target_whose_weights_were_replaced_are_not_taken(tmp_path: Path) -> None:
    """The config says where the weights are, the drafts' options too; neither says what they hold."""
    config = config_of(*TINY)
    variants, prompts = checked(config)
    one, same, other = (costs_file(tmp_path, config, weights, variants, prompts) for weights in ("a", "a", "b"))
    assert one == same != other


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["drafters=[]"], "there is no drafter to tune"),
        (["drafters=[ngrm]"], "Did you mean 'ngram'?"),
        (["drafters=[x]", "+candidates.x={kind: ngrm}"], "No drafter of kind 'ngrm'"),
        (["drafters=[x]", "+candidates.x={exit_layer: 2}"], "drafters.x has no kind"),
        (["drafters=[x]", "+candidates.x={kind: early_exit, exit_layer: 9}"], "exit_layer"),
        (["grid.num_drafted=[]", "candidates.ngram.sweep=null"], "is empty"),
        (["drafters=[x]", "+candidates.x={kind: eagle3, checkpoint: nowhere}"], "checkpoint=nowhere is not there"),
        (
            ["drafters=[x]", "+candidates.x={kind: hybrid, learned: {kind: mtp, checkpoint: nowhere}}"],
            "x.learned: checkpoint=nowhere is not there",
        ),
        (["top=0"], "top=0 is too small"),
        (["num_confirmed=0"], "num_confirmed=0 is too small"),
        (["measure=acceptance"], "the fastest is chosen by its times"),
        (["prompts=selfspec48"], "prompts: 2 prompts, for example 'chat-01', are not of the split 'tune'"),
        (["prompts@confirm=selfspec_tune24"], "are not of the split 'report'"),
        (["prompts.limit=1"], "prompts has 1 prompt"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_anything_is_measured(
    run: Callable[..., Any], tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(UserError) as raised:
        run(*overrides)
    assert message in str(raised.value)
    assert not list(tmp_path.rglob("*")), "nothing is left behind"


def test_prompts_to_confirm_on_that_were_chosen_on_are_refused(run: Callable[..., Any], tmp_path: Path) -> None:
    lines = [
        {"prompt_id": name, "prompt": text, "split": split}
        for name, text, split in [
            ("a", "One.", "tune"),
            ("b", "Two.", "tune"),
            ("c", "One.", "report"),
            ("d", "4", "report"),
        ]
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    halves = [f"{name}.{key}" for name in ("prompts", "confirm") for key in (f"path={path}", "limit=null")]
    with pytest.raises(UserError, match="the prompt 'a' is in `prompts` and in `confirm`"):
        run("prompts=jsonl", "prompts@confirm=jsonl", *halves, "prompts.split=tune", "confirm.split=report")


def test_the_shipped_candidates_are_there_and_make_a_grid() -> None:
    config = config_of()
    variants, prompts = checked(config)
    assert {one.drafter for one in variants} == {
        "eagle3", "exit_adapter", "medusa", "hydra", "mtp", "independent", "ngram", "hybrid",
    }  # fmt: skip
    grid = [one for variant in variants for one in candidates_of(variant, [[0.5, 0.2, 0.1]] * 3)]
    assert len({one.label for one in grid}) == len(grid) > 80
    assert {prompt.split for prompt in prompts} == {"tune"} and len(prompts) == 12
    drafters = {one.label: one.run_as() for one in grid}
    assert set(comparison(config, "check", drafters, config.prompts).drafters) == set(drafters), "labels name files"
