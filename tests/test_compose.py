"""Every experiment and every option of every conf group composes into a checked config."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from selfspec.config import CompareConfig, WatchConfig, conf_dir, conf_names, load_conf, resolve
from selfspec.drafters.registry import TRAINED
from selfspec.lookahead import build_lookahead

PRIMARIES = sorted(path.stem for path in conf_dir().glob("*.yaml"))
NO_GROUPS = {"sweep", "hydra"}  # files for `wandb sweep` and experiments/study.py; Hydra's own groups
FOLDERS = {path.name for path in conf_dir().iterdir() if path.is_dir()} - NO_GROUPS


def _groups_of(primary: str) -> set[str]:
    """The groups an entry point offers; not one that decides another (`train: ${drafter}`)."""
    entries = [entry for entry in OmegaConf.load(conf_dir() / f"{primary}.yaml").defaults if entry != "_self_"]
    chosen = {str(key): value for entry in entries for key, value in entry.items_ex(resolve=False)}
    return {group for group in FOLDERS & set(chosen) if f"${{{group}}}" not in chosen.values()}


COMPARE_GROUPS = ["target", "lookahead", "sampling", "prompts", "measure", "runtime", "tracking", "experiment"]
WATCH_GROUPS = ["target", "lookahead", "sampling", "runtime"]

# What has no default on purpose, because only the user can know it.
NEEDED = {
    ("target", "hf"): ["target.path=some/folder"],
    ("target", "gguf"): ["target.path=model.gguf"],
    ("drafter", "clasp"): ["drafter.num_skipped=2"],
    ("drafter", "early_exit"): ["drafter.exit_layer=2"],
    ("drafter", "independent"): ["drafter.model=some/folder"],
    ("drafter", "hybrid"): ["drafter.learned={kind: ngram}"],
    **{("drafter", kind): ["drafter.checkpoint=some/folder"] for kind in TRAINED},
    ("prompts", "jsonl"): ["prompts.path=prompts.jsonl"],
    ("prompts", "spec_bench"): ["prompts.path=question.jsonl"],
}


def _compose(primary: str, *overrides: str):
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose(primary, list(overrides))


def _options(groups: list[str]) -> list[tuple[str, str]]:
    return [(group, name) for group in groups for name in conf_names(group)]


@pytest.mark.parametrize(("group", "name"), _options([*COMPARE_GROUPS, "drafter"]))
def test_every_option_composes_into_a_comparison(group: str, name: str) -> None:
    composed = _compose("compare", f"{group}={name}", *NEEDED.get((group, name), []))
    assert isinstance(resolve(CompareConfig, composed), CompareConfig)


@pytest.mark.parametrize("name", conf_names("lookahead"))
@pytest.mark.parametrize("experiment", [None, *conf_names("experiment")])
def test_a_lookahead_asked_for_is_the_one_that_is_run(experiment: str | None, name: str) -> None:
    """Nothing of another policy stays in it: neither an experiment's K nor the schema's."""
    if experiment:
        config = resolve(CompareConfig, _compose("compare", f"experiment={experiment}", f"lookahead={name}"))
    else:
        config = resolve(WatchConfig, _compose("generate", "prompt=hello", f"lookahead={name}"))
    assert config.lookahead == load_conf("lookahead", name)
    build_lookahead(config.lookahead)


@pytest.mark.parametrize(("group", "name"), _options([*WATCH_GROUPS, "drafter"]))
def test_every_option_composes_for_watching_one_prompt(group: str, name: str) -> None:
    composed = _compose("generate", "prompt=hello", f"{group}={name}", *NEEDED.get((group, name), []))
    assert isinstance(resolve(WatchConfig, composed), WatchConfig)


@pytest.mark.parametrize("primary", PRIMARIES)
def test_hydra_leaves_nothing_behind(primary: str) -> None:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        hydra = compose(primary, return_hydra_config=True).hydra
    assert hydra.output_subdir is None
    assert hydra.job.chdir is False
    assert hydra.run.dir == "."
    assert not hydra.job_logging.get("handlers")


@pytest.mark.parametrize(
    ("group", "name"), _options(["target", "drafter", "lookahead", "sampling", "runtime", "measure"])
)
def test_files_read_without_hydra_stand_alone(group: str, name: str) -> None:
    """`load_target("smollm2-135m")` and `build_drafter("ngram", ...)` read these files directly."""
    conf = load_conf(group, name)
    assert "defaults" not in conf, f"conf/{group}/{name}.yaml would mean something else without Hydra"


@pytest.mark.parametrize("name", conf_names("drafter"))
def test_a_drafter_file_is_named_after_what_it_builds(name: str) -> None:
    assert load_conf("drafter", name).kind, f"conf/drafter/{name}.yaml names no kind"


@pytest.mark.parametrize("primary", PRIMARIES)
def test_every_option_of_every_entry_point_composes(primary: str) -> None:
    for group, name in _options(sorted(_groups_of(primary))):
        _compose(primary, f"{group}={name}")


def test_every_folder_of_conf_belongs_to_an_entry_point() -> None:
    used = set().union(*map(_groups_of, PRIMARIES))
    assert used >= FOLDERS


def test_the_long_answers_are_measured_with_the_drafts_of_the_paper() -> None:
    """smollm2_paper_128 says what differs from smollm2_paper, and nothing else differs: no setting is kept twice."""
    paper, long = (_compose("compare", f"experiment={name}") for name in ("smollm2_paper", "smollm2_paper_128"))
    assert set(long.drafters) == {"independent", "hybrid", "eagle3_tree", "hydra_tree"}
    assert long.drafters == {label: paper.drafters[label] for label in long.drafters}
    assert {key for key in paper if paper[key] != long[key]} == {"name", "max_new_tokens", "prompts", "drafters"}
    own = OmegaConf.load(conf_dir() / "experiment" / "smollm2_paper_128.yaml")
    assert "drafters" not in own, "a setting of its own would have to be kept equal to the paper's"
