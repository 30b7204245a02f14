"""The committed script that trains the shipped drafts is what their cards say that they were trained by, and the cards
are what was recorded.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file

from selfspec.config import conf_dir
from selfspec.target.packed import exact_in_half
from selfspec.training.card import card_text
from selfspec.training.config import MakeDataConfig, TrainJobConfig, resolve_job
from selfspec.training.data import load_dataset

ROOT = Path(__file__).parent.parent.parent
SMOLLM2 = ROOT / "experiments" / "smollm2"
DRAFTS = sorted(path.parent for path in SMOLLM2.glob("drafts/*/training.json"))
FOR_THE_BASE = [folder for folder in DRAFTS if folder.name != "layerskip"]  # which is a target of its own
MOST_BYTES = 45_000_000  # of all shipped drafts together
NOT_THE_DRAFTS = ("begin_with", "autocast", "log_every", "checkpoint_every")


def commands(entry: str) -> list[list[str]]:
    """The overrides of the script's calls of one entry point, in order; nothing is run."""
    env = {**os.environ, "PYTHON": "echo", "OUT": "o"}
    script = ["sh", "experiments/smollm2/train_drafts.sh"]
    lines = subprocess.run(script, env=env, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    calls = [line.split() for line in lines]
    return [overrides for name, *overrides in calls if name == f"experiments/{entry}.py"]


@pytest.fixture(scope="module")
def stages() -> dict[str, TrainJobConfig]:
    """By folder, as the script has them one after another."""
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        jobs = [resolve_job(TrainJobConfig, compose("train", overrides)) for overrides in commands("train")]
    return {job.out: job for job in jobs}


@pytest.mark.parametrize("folder", DRAFTS, ids=lambda folder: folder.name)
def test_the_script_trains_each_draft_as_its_card_says(folder: Path, stages: dict[str, TrainJobConfig]):
    facts: dict[str, Any] = json.loads((folder / "training.json").read_text())
    job = stages[f"o/{folder.name}"]
    assert job.drafter == {"kind": facts["kind"]}
    assert job.draft_options() == facts["draft"]
    ours = {name: value for name, value in asdict(job.train).items() if name not in NOT_THE_DRAFTS}
    theirs = {name: value for name, value in facts["train"].items() if name not in NOT_THE_DRAFTS}
    assert {name: list(value) if isinstance(value, tuple) else value for name, value in ours.items()} == theirs
    assert bool(job.train.begin_with) == ("begun_with" in facts)
    folders = [job.data] if isinstance(job.data, str) else job.data
    dataset = load_dataset([ROOT / one for one in folders], job.data_shards)
    assert {path.name for path in dataset.manifests} == set(facts["data"])
    for what in ("train_samples", "train_answer_tokens"):
        assert dataset.total(what) == facts[what]


def facts_and_log(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    lines = (folder / "log.jsonl").read_text().splitlines()
    return json.loads((folder / "training.json").read_text()), [json.loads(line) for line in lines]


@pytest.mark.parametrize("folder", FOR_THE_BASE, ids=lambda one: one.name)
def test_a_card_is_what_its_facts_and_its_log_say(folder: Path):
    """But for the line that names the data folders in the order given: the facts are sorted."""
    shipped, made = (folder / "README.md").read_text(), card_text(*facts_and_log(folder), notes=[])
    assert [x for x in shipped.splitlines() if x[:6] != "Data: "] == [x for x in made.splitlines() if x[:6] != "Data: "]


def test_a_card_shows_no_greedy_tau_where_no_answer_was_greedy():
    facts, log = facts_and_log(FOR_THE_BASE[0])
    facts["held_out"]["greedy_tau"] = facts["on_training_text"]["greedy_tau"] = log[-1]["held_out_greedy_tau"] = 0.0
    card = card_text(facts, log, notes=[])
    assert "(bonus token included) | — |" in card and "greedy τ —. At most" in card
    assert card.splitlines()[-1].endswith("| — |"), "the last line of the curve"


@pytest.mark.parametrize("folder", FOR_THE_BASE, ids=lambda one: one.name)
def test_float16_holds_each_matrix_of_a_draft_so_that_a_cpu_reads_half_the_bytes(folder: Path):
    weights = load_file(folder / "model.safetensors")
    matrices = {name: tensor for name, tensor in weights.items() if tensor.dim() == 2}
    assert matrices and [name for name, matrix in matrices.items() if not exact_in_half(matrix.float())] == []


def test_a_stage_begins_with_an_earlier_one_and_the_text_is_there(stages: dict[str, TrainJobConfig]):
    assert {f"o/{folder.name}" for folder in DRAFTS} <= set(stages)
    seen: list[str] = []
    for out, job in stages.items():
        assert job.train.begin_with is None or job.train.begin_with in seen
        seen.append(out)
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        made = [resolve_job(MakeDataConfig, compose("make_data", overrides)) for overrides in commands("make_data")]
    for job in made:
        manifest = json.loads((ROOT / job.out / "manifest.json").read_text())
        there, asked = manifest["settings"], asdict(job.data)
        assert {**there, "answer_tokens": 0} == {**asked, "answer_tokens": 0}
        made = manifest["totals"]["train_answer_tokens"] + manifest["totals"]["held_out_answer_tokens"]
        assert asked["answer_tokens"] <= made, "no text is added"


def test_the_shipped_drafts_are_small_together():
    assert len(DRAFTS) == 7
    assert sum(path.stat().st_size for path in SMOLLM2.glob("drafts/*/*.safetensors")) <= MOST_BYTES
