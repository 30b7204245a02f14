"""A target cut across two processes decodes what one process decodes, and only the first of them is seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_drafts import random_draft
from tensor_parallel_worker import decoded

from selfspec import Sampling, load_target
from selfspec.config import CompareConfig, TargetConfig, canonical
from selfspec.errors import UserError
from selfspec.measure.ranks import refuse_torchrun
from selfspec.records import read_run
from selfspec.target import Target
from selfspec.target.byte_tokenizer import byte_tokenizer
from selfspec.target.tensor_parallel import local_kv_heads
from tiny_models import prompt_ids, tiny_model

ROOT = Path(__file__).parent.parent.parent
VOCAB_SIZE = 300
FAMILIES = ("qwen3", "olmo2", "qwen3_moe")  # beside llama: norms on heads, projections that are gathered, experts
PROMPTS = [prompt_ids(7, vocab_size=256), prompt_ids(5, seed=1, vocab_size=256) * 2]
EXIT = {"drafter": "early_exit", "options": {"exit_layer": 2}}
KINDS = ("eagle3", "exit_adapter", "mtp")


@dataclass
class Ranks:
    """What two ranks did, and what one process does with the same."""

    folder: Path
    found: list[dict[str, Any]]
    cases: dict[str, dict[str, dict[str, Any]]]
    stdout: str
    stderr: str
    code: int

    def alone(self, model: str) -> Target:
        return load_target(self.folder / model, "float32", "cpu", fused=False, with_tokenizer=False)


def save(folder: Path, name: str, family: str, **settings: Any) -> Path:
    tiny_model(family, vocab_size=VOCAB_SIZE, max_positions=2048, **settings).save_pretrained(folder / name)
    return folder / name


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """One start of two processes for everything that is asked of them."""
    folder = tmp_path_factory.mktemp("ranks")
    byte_tokenizer().save_pretrained(save(folder, "llama", "llama", tied=True))
    for family in FAMILIES:
        save(folder, family, family)
    save(folder, "odd", "llama", num_heads=6, num_kv_heads=3, hidden_size=48)
    save(folder, "gpt2", "gpt2")
    broken = tiny_model("llama", vocab_size=VOCAB_SIZE)
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight[-1, 4] = float("nan")  # in the second rank's part
    broken.save_pretrained(folder / "broken")
    alone = load_target(folder / "llama", "float32", "cpu", fused=False)
    drafts = {kind: {"checkpoint": str(random_draft(kind, alone, folder / kind, **options(kind)))} for kind in KINDS}
    common = {"prompts": PROMPTS, "max_new_tokens": 8}  # every layer is two messages, and CI is busy
    sampled = {"temperature": 1.0, "acceptance": "coupled"}
    llama = {
        "ar": {},
        "sampled": sampled,
        "early_exit": EXIT,
        "paged": EXIT | {"cache": "paged"},
        "coupled": EXIT | sampled,
        "ngram": {"drafter": "ngram"},
        "independent": {"drafter": "independent", "options": {"model": str(folder / "qwen3")}},
        "expected_gain": EXIT | {"lookahead": {"kind": "expected_gain", "max_drafted": 3}, "max_new_tokens": 20},
        "reduced": EXIT | {"options": {"exit_layer": 2, "d_vocab": 120}},
        **drafts,
    }  # every way of drafting that has weights of its own, reads the head, or decides by a clock
    cases = {"llama": llama, **{family: {"early_exit": EXIT} for family in FAMILIES}}
    cases = {model: {name: common | case for name, case in of.items()} for model, of in cases.items()}
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(Path(__file__).parent / "tensor_parallel_worker.py"), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=1200, env=environment)
    files = [folder / f"rank{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), done.stderr
    found = [json.loads(file.read_text()) for file in files]
    return Ranks(folder, found, cases, done.stdout, done.stderr, done.returncode)


def options(kind: str) -> dict[str, Any]:
    return {"exit_layer": 1} if kind == "exit_adapter" else {}


@pytest.mark.slow
def test_both_ranks_decode_the_tokens_of_one_process(ranks: Ranks):
    names = [f"{model}/{name}" for model, cases in ranks.cases.items() for name in cases]
    assert list(ranks.found[0]["cases"]) == list(ranks.found[1]["cases"]) == names
    for model, cases in ranks.cases.items():
        target = ranks.alone(model)
        for name, case in cases.items():
            undrafted = {key: value for key, value in case.items() if key not in ("drafter", "options", "checkpoint")}
            wanted = decoded(target, undrafted | {"lookahead": 1})["token_ids"]
            for found in ranks.found:
                assert found["cases"][f"{model}/{name}"]["token_ids"] == wanted, f"{model}/{name}"
            drafted = ranks.found[0]["cases"][f"{model}/{name}"]["num_drafted"]
            assert drafted == ranks.found[1]["cases"][f"{model}/{name}"]["num_drafted"], "decided by one clock"
            assert ("drafter" in case or "checkpoint" in case) == any(sum(rounds) for rounds in drafted)
    assert ranks.found[0]["cases"]["llama/early_exit"]["num_accepted"] > 0


@pytest.mark.slow
def test_a_rank_holds_its_share_and_names_the_whole(ranks: Ranks):
    for model in ranks.cases:
        target, facts = ranks.alone(model), [found["facts"][model] for found in ranks.found]
        assert all(one["fingerprint"] == target.fingerprint for one in facts), model
        assert all(
            one["num_kv_heads"] == (2 if model == "olmo2" else target.layer_shapes[0].num_kv_heads // 2)
            for one in facts
        )
        assert 0.5 < facts[0]["weight_bytes"] / target.weight_bytes < 0.6, model
        assert facts[1]["head_sum"] == pytest.approx(float(target.head_weight_VM.detach().double().sum()), rel=1e-12)


@pytest.mark.slow
def test_generate_and_our_hook_in_it_work_on_the_cut_model(ranks: Ranks):
    target = ranks.alone("llama")
    wanted = target.hf_generate(PROMPTS[0], 12, Sampling()).token_ids
    for found in ranks.found:
        assert found["hf"] == wanted
        assert found["hf_hook"][len(PROMPTS[0]) :][: len(wanted)] == wanted
        assert found["told"] == ["mine", 0]


@pytest.mark.slow
def test_ranks_refuse_together_and_say_what_is_wrong(ranks: Ranks):
    wanted = {
        "three kv heads": "3 kv heads of this 'llama' cannot be dealt out to 2 ranks. Allowed: 3",
        "no plan": "no tensor-parallel plan for 'gpt2'",
        "fused": "fused=True",
        "not finite": "1 of the model's parameters hold NaN or infinite values, the first is model.layers.1.mlp.up",
        "three ranks": "tensor_parallel=3, but 2 processes run",
        "random": "random weights: save it",
        "arrivals": "arrivals_s needs one clock",
        "graphs": "rounds='whole' is not possible for a tensor-parallel target",
    }
    for found in ranks.found:
        assert list(found["refusals"]) == list(wanted)
        for name, part in wanted.items():
            assert part in found["refusals"][name], name
        assert "drew different tokens" in found["drifted"]


@pytest.mark.slow
def test_only_the_first_rank_writes_prints_and_is_compared(ranks: Ranks):
    (folder,) = (ranks.folder / "out" / "smoke").iterdir()
    run = read_run(folder)
    assert run.config["runtime"]["tensor_parallel"] == 2
    methods = ["hf_generate", "ar", "early_exit", "ngram", "eagle3", "ar_again"]
    assert len(run.prompts) == len({record.key for record in run.prompts}) == 2 * len(methods)
    assert all(record.equals_ar for record in run.prompts if record.method != "ar")
    assert all(found["one group"] for found in ranks.found), "a second group would find the first one's addresses"
    assert ranks.stdout.count("measured before") == 1
    assert ranks.stdout.count("2 ranks (tensor parallel)") == 2 and ranks.stdout.count(str(folder)) == 2


@pytest.mark.slow
def test_a_rank_that_fails_ends_all_with_its_one_error(ranks: Ranks):
    assert ranks.code != 0
    assert [line for line in ranks.stderr.splitlines() if line.startswith("error:")] == ["error: rank 1 cannot go on"]
    assert 'Traceback (most recent call last):\n  File "' + str(Path(__file__).parent) not in ranks.stderr


def test_one_rank_is_the_name_that_runs_had_before():
    config = CompareConfig(target=TargetConfig(kind="smollm2"), study="s", name="n")
    assert "tensor_parallel" not in canonical(config)["runtime"]
    config.runtime.tensor_parallel = 2
    assert canonical(config)["runtime"]["tensor_parallel"] == 2


def test_processes_that_were_not_asked_for_or_are_missing_are_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match=r"tensor_parallel=2, but 1 process runs.*--nproc-per-node=2"):
        load_target("smollm2-135m", device="cpu", tensor_parallel=2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match=r"4 times into one folder.*runtime\.tensor_parallel=4"):
        refuse_torchrun()


def test_a_plan_that_gathers_the_projections_leaves_every_kv_head_in_the_cache():
    assert local_kv_heads(tiny_model("llama"), 2, 2) == 1
    assert local_kv_heads(tiny_model("olmo2"), 2, 2) == 2
    assert local_kv_heads(tiny_model("gpt2"), 4, 1) == 4
