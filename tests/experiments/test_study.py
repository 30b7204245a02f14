"""The plain search loop: it finishes after kill -9, goes on over bad trials, never runs twice at once."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from selfspec.errors import UserError
from selfspec.records import take_lock
from selfspec.sweep import Space, load_space, space_of

pytest.importorskip("optuna")
REPO = Path(__file__).parent.parent.parent
sys.path.append(str(REPO / "experiments"))
study = importlib.import_module("study")
KEY = "drafters.early_exit.exit_layer"


def sweep_file(folder: Path, layers: list[int], **changes: Any) -> Path:
    """A sweep over the tiny experiment: a few seconds for all of it."""
    fixed = ["experiment=smoke_tiny", "~drafters.ngram", "measure.max_prompts=1", "measure.noise_check=false"]
    content = {
        "program": "experiments/compare.py",
        "method": "grid",
        "metric": {"name": "methods/early_exit/al_pooled", "goal": "maximize"},
        "parameters": {KEY: {"values": layers}},
        "command": [
            "${env}", "${interpreter}", "${program}", *fixed, "max_new_tokens=4", "measure.trace=0", "tracking=wandb",
            "${args_no_hyphens}",
        ],
    }  # fmt: skip
    path = folder / "layers.yaml"
    path.write_text(yaml.safe_dump({**content, **changes}))
    return path


def command(space: Path, out: Path, *more: str) -> list[str]:
    script = str(REPO / "experiments" / "study.py")
    return [sys.executable, script, f"space={space}", f"output_dir={out}", *more]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO), "PYTHONUNBUFFERED": "1"}


def trials_in(out: Path, name: str = "layers") -> list[Any]:
    import optuna

    return optuna.load_study(study_name=name, storage=f"sqlite:///{out / 'studies' / name}.sqlite").get_trials()


@pytest.mark.slow
def test_kill_9_loses_no_trial_and_measures_none_twice(tmp_path: Path):
    """A bad trial is among them: it is told, and does not end the search."""
    space = sweep_file(tmp_path, [1, 9, 2, 3])
    with subprocess.Popen(
        command(space, tmp_path), env=environment(), stdout=subprocess.PIPE, text=True, cwd=tmp_path
    ) as first:
        assert first.stdout is not None
        seen = ""
        while "trial 0:" not in seen:
            line = first.stdout.readline()
            assert line, seen
            seen += line
        first.send_signal(signal.SIGKILL)
    before = {path.parent.name for path in tmp_path.rglob("DONE")}
    done = subprocess.run(
        command(space, tmp_path), env=environment(), capture_output=True, text=True, cwd=tmp_path, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "exit_layer=9: failed: exit_layer=9" in seen + done.stdout
    assert "best of 3" in done.stdout
    complete = [trial for trial in trials_in(tmp_path) if trial.state.name == "COMPLETE"]
    assert sorted(trial.params[KEY] for trial in complete) == ["1", "2", "3"]
    folders = {path.parent.name for path in tmp_path.rglob("DONE")}
    assert before and before <= folders and len(folders) == 3


def fast_trials(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Stands in for measuring: the metric is the exit layer."""
    seen: list[list[str]] = []

    def run_trial(overrides: list[str], metric: str) -> Any:
        seen.append(overrides)
        return study.Outcome(float(overrides[-1].partition("=")[2]))

    monkeypatch.setattr(study, "run_trial", run_trial)
    return seen


def bayesian(tmp_path: Path) -> Space:
    ranges = {KEY: {"distribution": "int_uniform", "min": 1, "max": 30}}
    return load_space(str(sweep_file(tmp_path, [], method="bayes", parameters=ranges, run_cap=8)))


def test_a_bayesian_search_stays_in_its_range_and_remembers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = fast_trials(monkeypatch)
    config = study.StudyConfig(space="layers", output_dir=str(tmp_path))
    found = study.run_study(config, bayesian(tmp_path))
    layers = [int(overrides[-1].partition("=")[2]) for overrides in seen]
    assert len(layers) == 8 and all(1 <= layer <= 30 for layer in layers)
    assert found.best_value == max(layers)
    study.run_study(config, bayesian(tmp_path))
    assert len(seen) == 8, "all of it was done"
    config.trials = 10
    study.run_study(config, bayesian(tmp_path))
    assert len(seen) == 10


def test_a_trial_that_was_cut_short_comes_first_and_with_the_same_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    space = bayesian(tmp_path)
    (tmp_path / "studies").mkdir()
    cut_short = study.open_study(space, tmp_path / "studies", seed=3).ask(study.distributions(space))
    seen = fast_trials(monkeypatch)
    study.run_study(study.StudyConfig(space="layers", output_dir=str(tmp_path)), space)
    assert seen[0][-1] == f"{KEY}={cut_short.params[KEY]}"
    assert len(seen) == 8


def test_no_account_is_asked_for_unless_it_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = fast_trials(monkeypatch)
    for fixed, name in (([], "a"), (["tracking=wandb"], "b")):
        config = study.StudyConfig(space="layers", output_dir=str(tmp_path / name), fixed=fixed, trials=1)
        study.run_study(config, bayesian(tmp_path))
    assert not any("tracking" in text for text in seen[0]) and "tracking=wandb" in seen[1]


def test_the_same_search_does_not_run_twice_at_once(tmp_path: Path):
    held = f"studies/layers is being written by .*process {os.getpid()} on .*; wait for it, stop it"
    with take_lock(tmp_path / "studies", "", "layers"), pytest.raises(UserError, match=held):
        study.run_study(study.StudyConfig(output_dir=str(tmp_path)), bayesian(tmp_path))
    assert not (tmp_path / "studies" / "layers.sqlite").exists()
    take_lock(tmp_path / "studies", "", "others").close()  # another search in the same folder is free


def test_a_metric_that_nobody_measured_names_what_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(study, "compose_trial", lambda overrides: None)
    monkeypatch.setattr(study, "run_compare", lambda composed: {"methods": {"draft": {"al_pooled": 2}}})
    outcome = study.run_trial([], "methods/draft/al_poold")
    assert outcome.value is None and "Did you mean 'methods/draft/al_pooled'" in outcome.error
    untimed = study.run_trial([], "methods/draft/speedup_paired_geomean")
    assert untimed.value is None and "measure.timed=false measures none: search by" in untimed.error


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["space=bayes", "at_once=2"], "use executor=ray"),
        (["space=bayes", "executor=dask"], "Allowed: local, ray"),
        (["space=learning_rate"], "here only comparisons run"),
        (["space=bayes", "trials=many"], "Bad value for trials"),
    ],
)
def test_bad_study_options_are_refused(overrides: list[str], message: str):
    from hydra import compose, initialize_config_dir

    from selfspec.config import conf_dir

    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = compose("study", overrides)
    with pytest.raises(UserError, match=message):
        study.checked(composed)


def test_a_grid_has_every_combination():
    assert list(space_of(yaml.safe_load(SMALL), "small").grid()) == [{"a": "1", "b": "x"}, {"a": "1", "b": "y"}]


SMALL = """
method: grid
metric: {name: m, goal: minimize}
parameters: {a: {value: 1}, b: {values: [x, y]}}
command: ["${program}", "${args_no_hyphens}"]
"""


@pytest.mark.slow
def test_trials_run_on_a_ray_cluster(tmp_path: Path):
    """A cluster of this machine, really started; skipped where Ray is not installed, as after a plain `make test`."""
    pytest.importorskip("ray")
    space = sweep_file(tmp_path, [1, 9, 2])
    began = time.monotonic()
    more = ("executor=ray", "at_once=2", 'fixed=["measure.timed=false"]')
    done = subprocess.run(
        command(space, tmp_path, *more), env=environment(), capture_output=True, text=True, cwd=tmp_path, timeout=900
    )
    assert done.returncode == 0, (done.stderr, time.monotonic() - began)
    assert "best of 2" in done.stdout and "exit_layer=9: failed: exit_layer=9" in done.stdout
    assert len(list(tmp_path.rglob("DONE"))) == 2
