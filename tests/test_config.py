"""Bad configs are refused with what is allowed; the hash of a config means the same measurement."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from selfspec.config import (
    CompareConfig,
    GenerateConfig,
    RuntimeConfig,
    TargetConfig,
    conf_dir,
    config_hash,
    load_conf,
    resolve,
    run_dir,
    validate,
)
from selfspec.errors import UserError


def _config(*overrides: str) -> CompareConfig:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return resolve(CompareConfig, compose("compare", ["experiment=smoke_tiny", *overrides]))


# override -> what the message must say
BAD_INPUT = {
    "lookahead.num_drafted=0": "Allowed: 1 or more",
    "+drafters.early_exit.lookahead=0": "drafters.early_exit.lookahead=0",
    "+drafters.ngram.lookahead={kind: fixed, num_drafted: -1}": "drafters.ngram.lookahead.num_drafted=-1",
    "measure.repeats=0": "Allowed: 1 or more",
    "measure.repeats=None": "could not be converted to Integer",
    "measure.max_prompts=0": "Allowed: 1 or more",
    "max_new_tokens=0": "Allowed: 1 or more",
    "max_new_tokens=many": "could not be converted to Integer",
    "runtime.dtype=float16": "Allowed on cpu: float32, bfloat16, float64",
    "runtime.dtype=flaot32": "Did you mean 'float32'?",
    "runtime.device=gpu": "Allowed: auto, cpu, cuda",
    "runtime.num_threads=0": "Allowed: 1 or more",
    "runtime.cache=page": "Did you mean 'paged'?",
    "acceptance=rejecton": "Did you mean 'rejection'?",
    "target.kind=huggingface": "Allowed: gguf, hf, random, smollm2",
    "target.kind=hf": "needs target.path",
    "target.shape.num_layers=0": "Allowed: 1 or more",
    "+target.layers=3": "No key 'target.layers'. Allowed: ",
    "+tempature=1": "No key 'tempature'",
    "+drafters.ar.kind=ngram": "is taken",
    "+drafters.x.exit_layer=2": "has no kind",
    "+measure.trce=1": "Did you mean 'trace'?",
    "measure.trace=-1": "Allowed: 0 or more",
    "name=../elsewhere": "Allowed: letters, digits",
    "drafter=independent": "drafter.model=...",
}


@pytest.mark.parametrize("override", BAD_INPUT)
def test_bad_input_is_refused_with_what_is_allowed(override: str) -> None:
    with pytest.raises(UserError) as error:
        _config(override)
    assert BAD_INPUT[override] in str(error.value)
    assert "\n" not in str(error.value)


def test_a_label_names_columns_and_cannot_be_a_path() -> None:
    with pytest.raises(UserError, match="Allowed: letters, digits"):
        _config("drafter=ngram", "+drafter.label=a/b")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"Allowed: gguf, hf, .*smollm2-135m.*Did you mean 'smollm2-135m'"):
        load_conf("target", "smolm2-135m")
    with pytest.raises(UserError, match="No conf group 'targets'.*Did you mean 'target'"):
        load_conf("targets", "hf")


def test_validate_serves_configs_made_in_python_too() -> None:
    good = GenerateConfig(target=TargetConfig(kind="smollm2"), runtime=RuntimeConfig("cpu", "float32"))
    validate(good)
    good.lookahead = {"kind": "fixed", "num_drafted": 0}
    with pytest.raises(UserError, match="lookahead.num_drafted=0"):
        validate(good)


def test_a_single_drafter_joins_the_others_under_its_own_name() -> None:
    config = _config("drafter=early_exit", "drafter.exit_layer=3")
    assert config.drafters["early_exit"]["exit_layer"] == 3, "what the command line says wins"
    config = _config("drafter=early_exit", "drafter.exit_layer=3", "+drafter.label=deep")
    assert config.drafters["early_exit"]["exit_layer"] == 2
    assert config.drafters["deep"]["exit_layer"] == 3
    assert list(_config("drafter=none").drafters) == list(_config().drafters)


def test_a_drafter_can_be_left_out() -> None:
    assert list(_config("~drafters.ngram").drafters) == ["early_exit"]
    assert list(_config("~drafters.early_exit").drafters) == ["ngram"]


@pytest.mark.parametrize(
    "override",
    [
        "+tracking.project=elsewhere",
        "output_dir=/somewhere/else",
        "study=other",
        "name=other",
        "force=true",
        "sampling.temperature=0",
        "seed=0",
        "drafter=none",
    ],
)
def test_the_hash_ignores_where_results_go(override: str) -> None:
    assert config_hash(_config(override)) == config_hash(_config())


@pytest.mark.parametrize(
    "override",
    [
        "sampling.temperature=0.5",
        "drafters.early_exit.exit_layer=3",
        "seed=1",
        "max_new_tokens=13",
        "runtime.dtype=bfloat16",
        "measure.repeats=2",
        "target.seed=1",
        "~drafters.ngram",
        "+prompts.limit=3",
    ],
)
def test_the_hash_sees_everything_that_is_measured(override: str) -> None:
    assert config_hash(_config(override)) != config_hash(_config())


def test_the_hash_ignores_which_gpu() -> None:
    assert config_hash(_config("runtime.device=cuda:1")) == config_hash(_config("runtime.device=cuda"))
    assert config_hash(_config("runtime.device=cuda")) != config_hash(_config("runtime.device=cpu"))


def test_single_and_named_drafter_are_the_same_measurement() -> None:
    one = _config("drafter=early_exit", "drafter.exit_layer=3")
    assert config_hash(one) == config_hash(_config("drafters.early_exit.exit_layer=3"))


def test_the_hash_does_not_depend_on_the_process_or_on_key_order() -> None:
    script = (
        "from hydra import compose, initialize_config_dir\n"
        "from selfspec.config import *\n"
        "with initialize_config_dir(str(conf_dir()), version_base='1.3'):\n"
        "    print(config_hash(resolve(CompareConfig, compose('compare', ['experiment=smoke_tiny']))))"
    )
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    config = _config()
    assert other == config_hash(config)
    config.drafters = dict(reversed(config.drafters.items()))
    assert other == config_hash(config)


def test_the_run_directory_is_named_by_study_name_and_hash() -> None:
    config = _config("output_dir=results")
    assert run_dir(config).as_posix() == f"results/smoke/tiny-{config_hash(config)[:8]}"


def test_config_needs_neither_torch_nor_hydra() -> None:
    script = "import sys, selfspec.config; assert not {'torch', 'hydra', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_missing_values_are_asked_for() -> None:
    with pytest.raises(UserError, match=r"No value for name, study, target.kind"):
        resolve(CompareConfig, OmegaConf.create({}))
