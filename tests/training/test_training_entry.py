"""The two commands as a user types them: a tiny chat model makes data and trains a draft; mistakes are one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from selfspec.config import conf_dir, conf_names
from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.training.config import MakeDataConfig, TrainJobConfig, resolve_job
from selfspec.training.trainee import trainees

ROOT = Path(__file__).parent.parent.parent


def run(script: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "experiments" / script), *overrides]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)


def test_every_training_config_composes():
    assert set(conf_names("train")) >= set(trainees())  # a recipe for every draft that can be trained
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        for kind in sorted(set(trainees()) & set(conf_names("drafter"))):
            job = resolve_job(TrainJobConfig, compose("train", [f"drafter={kind}", "data=d", "out=o"]))
            assert job.drafter == {"kind": kind}
        for recipe in conf_names("train"):
            resolve_job(TrainJobConfig, compose("train", [f"train={recipe}", "data=d", "out=o"]))
        for kind in sorted(set(trainees()) & set(conf_names("drafter"))):  # in a clone, smoke needs nothing more
            smoke = resolve_job(TrainJobConfig, compose("train", [f"drafter={kind}", "train=smoke"]))
            files = [f"{smoke.data}/manifest.json", smoke.draft_options().get("draft_vocab") or smoke.data]
            assert all((ROOT / file).exists() for file in files)
        assert resolve_job(MakeDataConfig, compose("make_data", ["out=o"])).prompts(None) is None
        with pytest.raises(UserError, match="several sources of prompts"):
            resolve_job(MakeDataConfig, compose("make_data", ["out=o", "prompt_file=p", "prompt_dataset.path=d"]))
        with pytest.raises(UserError, match="No value for data, out"):
            resolve_job(TrainJobConfig, compose("train", []))
        with pytest.raises(UserError, match=r"train\.stepz|stepz"):
            resolve_job(TrainJobConfig, compose("train", ["data=d", "out=o", "+train.stepz=3"]))
        with pytest.raises(UserError, match=r"train\.steps=0"):
            resolve_job(TrainJobConfig, compose("train", ["data=d", "out=o", "train.steps=0"]))


@pytest.mark.slow
def test_the_two_commands_make_data_and_a_draft(chat_target: Target, tmp_path: Path):
    model = tmp_path / "model"
    chat_target.hf_model.save_pretrained(model)
    chat_target.tokenizer.save_pretrained(model)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(60)))
    target = ["target=hf", f"target.path={model}", "runtime=cpu_float32", "runtime.num_threads=1"]
    sizes = ["data.max_new_tokens=12", "data.max_sequence_tokens=60", "data.rows=8", "data.held_out_share=0.2"]
    data = ["data.answer_tokens=300", "data.shard_samples=16", f"draft_vocab={tmp_path / 'vocab.safetensors'}"]
    made = run("make_data.py", f"out={tmp_path / 'data'}", f"prompt_file={prompts}", *target, *sizes, *data)
    assert made.returncode == 0, made.stderr
    assert "tokens cover" in made.stdout
    short = ["train=smoke", "train.steps=6", "train.warmup_steps=1", "train.validate_every=3", "train.num_kept=8"]
    draft = ["draft.hidden_size=16", "draft.num_layers=1", "draft.num_heads=2", "draft.num_kv_heads=1"]
    where = [f"data={tmp_path / 'data'}", f"out={tmp_path / 'draft'}", "tracking=jsonl"]
    trained = run("train.py", *target, *short, *(f"+{option}" for option in draft), *where)
    assert trained.returncode == 0, trained.stderr
    assert json.loads((tmp_path / "draft" / "training.json").read_text())["train"]["steps"] == 6
    assert "held_out_alpha" in (tmp_path / "draft" / "tracking.jsonl").read_text()

    wrong = run("train.py", *target, f"data={tmp_path / 'none'}", f"out={tmp_path / 'x'}")
    assert wrong.returncode == 1 and wrong.stderr.startswith("error: No training data in")
    assert "Traceback" not in wrong.stderr and not (tmp_path / "x").exists()
