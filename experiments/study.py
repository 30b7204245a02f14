"""A search in one plain loop: the trials of a conf/sweep file, one after another here, or on the machines of a Ray
cluster. Each trial is the main job with a run directory of its own; Optuna chooses what to try and remembers it.

    python experiments/study.py space=exit_layer_lookahead
    python experiments/study.py space=bayes trials=30

Killed at any time, even by `kill -9`, the same command goes on. The best of many trials is flattered by having been
chosen; what the search found is worth measuring again, on other prompts.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from selfspec.config import allowed, conf_dir
from selfspec.errors import UserError
from selfspec.records import take_lock, writable
from selfspec.run import entry_point, run_compare
from selfspec.sweep import Choice, Space, load_space
from selfspec.tracking.base import flatten

try:
    import optuna
    from optuna.trial import TrialState
except ImportError:
    raise SystemExit("error: experiments/study.py needs Optuna: pip install -c constraints.txt -e '.[study]'") from None

EXECUTORS = ("local", "ray")
DEFAULT_TRIALS = 20


@dataclass
class StudyConfig:
    """conf/study.yaml."""

    space: str = MISSING
    trials: int | None = None
    fixed: list[str] = field(default_factory=list)
    executor: str = "local"
    at_once: int = 1
    address: str | None = None
    seed: int = 0
    output_dir: str = "outputs"


@dataclass(frozen=True)
class Outcome:
    """What a trial led to: the metric, or why there is none."""

    value: float | None
    error: str | None = None


Tell = Callable[[Any, Outcome], None]


def checked(composed: DictConfig) -> tuple[StudyConfig, Space]:
    try:
        config = OmegaConf.to_object(
            OmegaConf.merge(OmegaConf.structured(StudyConfig), composed_without_hydra(composed))
        )
    except OmegaConfBaseException as error:
        raise UserError(f"Bad value for {error.full_key}: {str(error.msg or error).splitlines()[0]}.") from error
    assert isinstance(config, StudyConfig)
    if config.executor not in EXECUTORS:
        raise UserError(f"executor={config.executor!r} is unknown. {allowed(config.executor, EXECUTORS)}")
    if config.at_once < 1 or (config.executor == "local" and config.at_once > 1):
        raise UserError(f"at_once={config.at_once} is not possible with executor={config.executor}: use executor=ray.")
    space = load_space(config.space)
    if Path(space.program).name != "compare.py":
        raise UserError(
            f"sweep {space.name} runs {space.program}; here only comparisons run. Use `wandb agent` for it."
        )
    return config, space


def composed_without_hydra(composed: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])


# ---- one trial


def compose_trial(overrides: list[str]) -> DictConfig:
    """The main job's config with these overrides, which its run directory will name."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = compose("compare", overrides, return_hydra_config=True)
    HydraConfig.instance().set_config(composed)
    return composed_without_hydra(composed)


def run_trial(overrides: list[str], metric: str) -> Outcome:
    """The main job, measured or already measured. Never raises: a bad trial must not end the search."""
    try:
        summary = flatten(run_compare(compose_trial(overrides)))
    except UserError as error:
        return Outcome(None, str(error))
    except Exception:  # whatever a model or a machine can do to one trial
        return Outcome(None, traceback.format_exc())
    if metric not in summary:
        why = " measure.timed=false measures none: search by methods/<label>/al_pooled." if "speedup" in metric else ""
        return Outcome(None, f"no number named {metric} was measured.{why} {allowed(metric, summary)}")
    return Outcome(float(summary[metric]))


# ---- which trials


def open_study(space: Space, folder: Path, seed: int) -> optuna.Study:
    """What is known about this space so far, in one SQLite file that survives being killed."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    startup = 5 if space.method == "bayes" else 0
    sampler = (
        optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup)
        if space.method == "bayes"
        else optuna.samplers.RandomSampler(seed=seed)
    )
    return optuna.create_study(
        storage=f"sqlite:///{folder / space.name}.sqlite",
        study_name=space.name,
        sampler=sampler,
        direction="maximize" if space.maximize else "minimize",
        load_if_exists=True,
    )


def distributions(space: Space) -> dict[str, Any]:
    """Optuna's names for the same ranges."""
    made: dict[str, Any] = {}
    for key, one in space.parameters.items():
        if isinstance(one, Choice):
            made[key] = optuna.distributions.CategoricalDistribution(one.values)
        elif one.integer:
            made[key] = optuna.distributions.IntDistribution(int(one.low), int(one.high))
        else:
            made[key] = optuna.distributions.FloatDistribution(one.low, one.high, log=one.log)
    return made


def still_to_run(study: optuna.Study, space: Space, trials: int | None) -> Iterator[optuna.Trial]:
    """Trials of an earlier start that were cut short, then what is left; each chosen when it is asked for."""
    for cut_short in study.get_trials(states=(TrialState.RUNNING,)):
        study.tell(cut_short.number, state=TrialState.FAIL)
        study.enqueue_trial(cut_short.params)
    if space.method == "grid":
        for point in space.grid():
            study.enqueue_trial(point, skip_if_exists=True)
        left = len(study.get_trials(states=(TrialState.WAITING,)))
        left = left if trials is None else min(left, max(0, trials - num_finished(study)))
    else:
        left = (trials or space.run_cap or DEFAULT_TRIALS) - num_finished(study)
    for _ in range(left):
        yield study.ask(distributions(space))


def num_finished(study: optuna.Study) -> int:
    """Measured, or refused with a reason; not those that were killed."""
    ended = study.get_trials(states=(TrialState.COMPLETE, TrialState.FAIL))
    return sum(trial.state == TrialState.COMPLETE or "error" in trial.user_attrs for trial in ended)


# ---- where they run


def run_here(trials: Iterator[optuna.Trial], overrides: Callable[[Any], list[str]], metric: str, tell: Tell) -> None:
    for trial in trials:
        tell(trial, run_trial(overrides(trial), metric))


def run_on_ray(
    trials: Iterator[optuna.Trial],
    overrides: Callable[[Any], list[str]],
    metric: str,
    tell: Tell,
    config: StudyConfig,
) -> None:
    """`at_once` trials at a time. One that is timed asks for all cores of the cluster's largest machines: two of them
    never share one. Needs Ray, and one file system for the run directories.
    """
    try:
        import ray
    except ImportError:
        raise UserError("executor=ray needs Ray: pip install -c constraints.txt -e '.[ray]'") from None
    ray.init(address=config.address, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    whole_machine = max(node["Resources"].get("CPU", 1) for node in ray.nodes() if node["Alive"])
    waiting: dict[Any, Any] = {}

    def finish_one() -> None:
        (ready,), _ = ray.wait(list(waiting), num_returns=1)
        tell(waiting.pop(ready), ray.get(ready))

    try:
        for trial in trials:
            chosen = overrides(trial)
            timed = compose_trial(chosen).measure.timed
            task = ray.remote(run_trial).options(num_cpus=whole_machine if timed else 1, max_retries=0)
            waiting[task.remote(chosen, metric)] = trial
            if len(waiting) >= config.at_once:
                finish_one()
        while waiting:
            finish_one()
    finally:
        ray.shutdown()


# ---- the loop


def run_study(config: StudyConfig, space: Space) -> optuna.Study:
    """Runs what is left of a search, and prints each trial as it ends."""
    folder = Path(config.output_dir) / "studies"
    fixed = [text for text in space.fixed if not text.startswith("tracking=")]  # no account needed unless asked for

    def overrides(trial: optuna.Trial) -> list[str]:
        swept = [text for text in space.arguments(trial.params) if text not in space.fixed]
        return [*fixed, f"output_dir={config.output_dir}", *config.fixed, *swept]

    def tell(trial: optuna.Trial, outcome: Outcome) -> None:
        shown = " ".join(f"{key}={value}" for key, value in trial.params.items())
        if outcome.error is not None:
            trial.set_user_attr("error", outcome.error)
            study.tell(trial, state=TrialState.FAIL)
            print(f"trial {trial.number}: {shown}: failed: {outcome.error}", flush=True)
        else:
            study.tell(trial, outcome.value)
            print(f"trial {trial.number}: {shown}: {space.metric} = {outcome.value:.4g}", flush=True)

    with writable(folder, "output_dir"):
        lock = take_lock(folder, "choose another place: output_dir=...", space.name)
    with lock:
        study = open_study(space, folder, config.seed)
        trials = still_to_run(study, space, config.trials)
        if config.executor == "ray":
            run_on_ray(trials, overrides, space.metric, tell, config)
        else:
            run_here(trials, overrides, space.metric, tell)
    return study


@entry_point("study")
def main(composed: DictConfig) -> None:
    if OmegaConf.is_missing(composed, "space"):
        raise UserError("No value for space. Give it on the command line: space=exit_layer_lookahead")
    config, space = checked(composed)
    study = run_study(config, space)
    complete = study.get_trials(states=(TrialState.COMPLETE,))
    if not complete:
        raise UserError(f"no trial of {space.name} was measured; the lines above say why.")
    best = study.best_trial
    chosen = " ".join(f"{key}={value}" for key, value in best.params.items())
    print(f"best of {len(complete)}: {chosen}: {space.metric} = {best.value:.4g}")
    print("It was chosen for being high: measure it again on other prompts. With a band for having looked at all:")
    name = next((text.partition("=")[2] for text in space.fixed if text.startswith("study=")), "compare")
    print(f"  python experiments/report.py runs={config.output_dir}/{name} format=sweep allow_tuning=true")


if __name__ == "__main__":
    main()
