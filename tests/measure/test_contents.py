"""What the paths in a drafter's options hold is part of what was measured, also of a draft inside a draft."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from layer_drafts import random_draft

from selfspec.config import CompareConfig, conf_dir, resolve
from selfspec.measure.bench import assemble, hashes_of_contents
from selfspec.prompts import prompts_from_config
from selfspec.target import load_target
from selfspec.tuning.costs import costs_file
from selfspec.tuning.grid import Grid, variants_of

FILES = {
    "draft/config.json": "checkpoint/config.json",
    "draft/model.safetensors": "checkpoint/model.safetensors",
    "model/model-00002.safetensors": "model/model-00002.safetensors",
    "model/draft_vocab.safetensors": "model/draft_vocab.safetensors",
    "ids.safetensors": "draft_vocab/ids.safetensors",
    "found/layer_skip.json": "sets/layer_skip.json",
    "learned/model.safetensors": "learned.checkpoint/model.safetensors",
    "learned/ids.safetensors": "learned.draft_vocab/ids.safetensors",
}


@pytest.fixture
def options(tmp_path: Path) -> dict:
    for name in (*FILES, "draft/README.md", "draft/log.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("one")
    own = {"checkpoint": "draft", "model": "model", "draft_vocab": "ids.safetensors", "sets": "found"}
    learned = {"checkpoint": "learned", "draft_vocab": "learned/ids.safetensors"}
    paths = [{key: str(tmp_path / name) for key, name in one.items()} for one in (own, learned)]
    return {"kind": "hybrid", **paths[0], "learned": {"kind": "eagle3", **paths[1]}, "max_match": 4}


def test_every_file_that_makes_a_draft_is_found_and_no_other(options, tmp_path) -> None:
    before = hashes_of_contents(options)
    assert set(before) == set(FILES.values()) | {"learned.checkpoint/ids.safetensors"}
    for file, name in FILES.items():
        (tmp_path / file).write_text("two")
        assert hashes_of_contents(options)[name] != before[name]
        (tmp_path / file).write_text("one")
    (tmp_path / "draft" / "log.jsonl").write_text("two")
    assert hashes_of_contents(options) == before


def test_names_that_are_no_path_have_no_contents() -> None:
    assert hashes_of_contents({"kind": "independent", "model": "some/hub-id", "draft_vocab": None}) == {}
    assert hashes_of_contents({"kind": "ngram", "max_match": 4}) == {}


def config_of() -> CompareConfig:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return resolve(CompareConfig, compose("compare", ["experiment=smoke_tiny"]))


def test_a_run_and_the_tuner_notice_other_weights_of_a_draft_inside_a_draft(tmp_path) -> None:
    config = config_of()
    hybrid = {"kind": "hybrid", "learned": {"kind": "exit_adapter", "checkpoint": str(tmp_path)}}
    config.drafters = {"hybrid": hybrid}
    target = load_target(config.target, config.runtime.dtype)
    prompts, fingerprints, costs = prompts_from_config(config.prompts), [], []
    for seed in (1, 2):
        random_draft("exit_adapter", target, tmp_path, exit_layer=2, seed=seed)
        fingerprints.append(assemble(config).fingerprints)
        costs.append(costs_file(tmp_path, config, "weights", variants_of("hybrid", hybrid, Grid()), prompts))
    changed = {name for name in fingerprints[0] if fingerprints[0][name] != fingerprints[1][name]}
    assert changed == {"draft hybrid: learned.checkpoint/model.safetensors"}
    assert costs[0] != costs[1]
