"""The GPU protocol on the CPU: every section runs, none spoils another, and no more is installed than it needs."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from gpu.op_tape import TapeRecorder
from omegaconf import OmegaConf

from experiments import gpu_protocol
from selfspec import UserError
from selfspec.decoding import Decoder, graphs
from selfspec.measure import gpu, gpu_sections
from selfspec.measure.sections import OutOfTime, at_most, attempt, errors_in

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    # the machine may be busy
    patient = {name: (measure, 2000.0) for name, (measure, _) in gpu_sections.SECTIONS.items()}
    monkeypatch.setattr(gpu_protocol, "SECTIONS", patient)
    return gpu_protocol.ProtocolConfig("cpu", "tiny", None, 2000, list(patient), str(tmp_path))


def test_the_whole_protocol_runs_without_a_gpu_and_says_what_it_left_out(tiny, tmp_path):
    begin = time.process_time()
    result = gpu_protocol.protocol(tiny)
    assert time.process_time() - begin < 30
    assert result["errors"] == []
    assert json.loads((tmp_path / "gpu_protocol.json").read_text())["provenance"]["git"] is not False
    text = (tmp_path / "gpu_protocol.md").read_text()
    assert "split and whole-round graphs are skipped" in text and "no real model asked for" in text
    for name in gpu_sections.SECTIONS:
        assert f"## {name}" in text
    assert result["sections"]["correctness"]["small"] == {"compared": 44, "different": []}
    assert result["sections"]["rounds"]["tiny, early_exit"]["tau"] > 2, "certain tokens are accepted"
    taus = [result["sections"]["synthetic"]["tiny"][str(rate)]["tau"] for rate in gpu_sections.ACCEPT_RATES]
    assert taus == sorted(taus)


def test_all_modes_are_compared_where_there_are_graphs(tiny, monkeypatch):
    """With recorded operators in place of CUDA graphs."""
    monkeypatch.setattr(graphs, "CudaRecorder", TapeRecorder)
    monkeypatch.setattr(graphs, "can_be_captured", lambda rows, sampler: True)
    monkeypatch.setattr(gpu.Bench, "modes", ("eager", "split", "whole"))
    monkeypatch.setattr(gpu_sections, "SAMPLED", gpu_sections.Sampling(temperature=0.9))  # top-p sorts by numpy here
    rules = {"greedy": {}, "coupled": {"sampling": gpu_sections.SAMPLED, "acceptance": "coupled"}}
    monkeypatch.setattr(gpu_sections, "RULES", rules)
    tiny.sections = ["correctness", "autoregressive", "rounds", "synthetic"]
    result = gpu_protocol.protocol(tiny)
    assert result["errors"] == []
    assert result["sections"]["correctness"]["small"]["compared"] == 4 * 2 * 3 * 4
    part = result["sections"]["rounds"]["tiny, synthetic"]
    assert set(part["speedup_of_whole_over"]) == {"eager", "split"}
    assert part["captures"]["number"] >= 1
    assert "| tiny, ngram | whole |" in gpu_protocol.markdown(result)


def test_tokens_that_differ_are_an_error(tiny, monkeypatch):
    decode = Decoder.decode

    def wrong(self, *args, **options):
        outputs = decode(self, *args, **options)
        if self.drafter.name == "ngram":
            outputs[0].token_ids[-1] += 1
        return outputs

    monkeypatch.setattr(Decoder, "decode", wrong)
    tiny.sections = ["correctness"]
    result = gpu_protocol.protocol(tiny)
    assert "tokens differ: ngram, greedy, eager" in result["errors"][0]


def test_one_section_that_fails_and_one_that_hangs_cost_only_themselves(tiny, monkeypatch):
    def fails(bench, result, left):
        attempt(result, "half", lambda part: part.update(found=1) or 1 / 0)
        raise MemoryError("gone")

    def hangs(bench, result, left):
        result["before"] = 3
        while True:
            with contextlib.suppress(Exception):  # as libraries do
                time.sleep(0.01)

    broken = {"rounds": (fails, 10), "memory": (hangs, 1)}
    monkeypatch.setattr(gpu_protocol, "SECTIONS", gpu_sections.SECTIONS | broken)
    tiny.sections = ["rounds", "memory", "bandwidth"]
    result = gpu_protocol.protocol(tiny)
    sections = result["sections"]
    assert sections["rounds"]["half"]["found"] == 1
    assert sections["memory"]["before"] == 3 and sections["memory"]["seconds"] < 5
    assert sections["bandwidth"]["read_bytes_per_s"] > 0
    assert result["errors"] == [
        "rounds: MemoryError: gone",
        "rounds/half: ZeroDivisionError: division by zero",
        "memory: OutOfTime: longer than 1 s",
    ]
    text = gpu_protocol.markdown(result)
    assert "ERROR memory: OutOfTime" in text and "copying" in text
    with pytest.raises(UserError, match="3 parts failed"):
        gpu_protocol.run(OmegaConf.structured(tiny))


def test_nothing_begins_when_no_time_is_left(tiny):
    tiny.seconds = 0
    result = gpu_protocol.protocol(tiny)
    assert len(result["errors"]) == len(gpu_sections.SECTIONS)
    assert "nothing is left of 0 s" in result["errors"][0]


def test_time_is_up_once():
    with pytest.raises(OutOfTime), at_most(0.05) as left:
        assert left() > 0
        while True:
            pass
    time.sleep(0.1)
    assert errors_in({"a": {"b": {"error": "x"}}}) == ["a/b: x"]


def test_a_real_model_that_cannot_be_loaded_is_left_out():
    bench = gpu.Bench(torch.device("cpu"), gpu.SCALES["tiny"])
    assert gpu.add_real_model(bench, "no/such-folder/anywhere").startswith(
        "no/such-folder/anywhere left out: UserError"
    )
    assert bench.labels == ["tiny"]


@pytest.mark.parametrize("name", ["random-tiny"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_next_token_of_a_certain_target_survives_half_precision(name, tied, monkeypatch):
    if tied:
        loaded = gpu.load_target

        def tie(*args, **options):
            target = loaded(*args, **options)
            target.hf_model.lm_head.weight = target.hf_model.model.embed_tokens.weight
            return gpu.Target(target.hf_model)

        monkeypatch.setattr(gpu, "load_target", tie)
    target = gpu.certain_target(name, "bfloat16", torch.device("cpu"))
    assert target.tied == tied
    tokens = Decoder(target, None).decode([[5, 9, 300]], max_new_tokens=20, ignore_eos=True)[0].token_ids
    assert tokens == ([300] * 20 if tied else [(301 + i) % target.vocab_size for i in range(20)])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("scale=huge", "scale='huge' is unknown.*full, tiny"),
        ("sections=[speed]", "sections holds 'speed'"),
        ("seconds=long", "Bad value for seconds"),
        ("repeats=3", "Bad value for repeats"),
    ],
)
def test_mistakes_are_named(given, message):
    with pytest.raises(UserError, match=message):
        gpu_protocol.typed(OmegaConf.from_dotlist([given]))


def test_it_runs_on_a_bare_machine(tmp_path):
    """As on a rented GPU: torch, transformers, omegaconf and what these bring along, and nothing else of ours."""
    absent = ("hydra", "wandb", "rich", "matplotlib", "gguf", "einops", "scipy", "pandas")
    code = (
        f"import sys, runpy; sys.modules.update(dict.fromkeys({absent!r}))\n"
        "sys.argv = ['gpu_protocol.py', 'device=cpu', 'scale=tiny', 'real_model=null', "
        f"'sections=[bandwidth,memory]', 'out={tmp_path}']\n"
        "runpy.run_path('experiments/gpu_protocol.py', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "## memory" in done.stdout and (tmp_path / "gpu_protocol.json").exists()
