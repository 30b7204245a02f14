"""The trace of a real run holds the run's own tokens, and the p and q that two plain forward passes give."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from selfspec import Sampling, build_drafter, wrap_target
from selfspec.config import CompareConfig, conf_dir, resolve
from selfspec.errors import UserError
from selfspec.lookahead import build_lookahead
from selfspec.measure.methods import Settings, decode_method
from selfspec.measure.tracing import number, piece
from selfspec.records import read_run, read_traces
from selfspec.report.build import build_report
from selfspec.run import run_compare
from selfspec.target import load_target
from tiny_models import prompt_ids, tiny_llama

EXIT_LAYER = 2


def measured(out: Path, *overrides: str) -> Path:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = compose(
            "compare", ["experiment=smoke_tiny", f"output_dir={out}", "measure.max_prompts=2", *overrides]
        )
    run_compare(composed)
    (done,) = out.rglob("DONE")
    return done.parent


@pytest.fixture(scope="module")
def sampled_run(tmp_path_factory) -> Path:
    return measured(tmp_path_factory.mktemp("sampled"), "sampling=t1", "measure.trace=2", "max_new_tokens=16")


@pytest.fixture(scope="module")
def target(sampled_run):
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = resolve(CompareConfig, compose("compare", ["experiment=smoke_tiny"]))
    return load_target(config.target, "float32", "cpu")


def test_every_method_with_rounds_is_traced_and_its_tokens_and_times_are_the_records(sampled_run):
    traces = read_traces(sampled_run / "traces.jsonl")
    records = {record.key: record for record in read_run(sampled_run).prompts}
    assert {trace.method for trace in traces} == {"ar", "early_exit", "ngram"} and len(traces) == 6
    for trace in traces:
        record = records[trace.prompt_id, trace.method, 0]
        kept = [token.token_id for entry in trace.rounds for token in entry.tokens if token.kind != "rejected"]
        assert kept == record.token_ids
        assert trace.times_measured
        assert [entry.verify_s for entry in trace.rounds] == [entry.verify_s for entry in record.rounds]
        for entry, counted in zip(trace.rounds, record.rounds, strict=True):
            kinds = [token.kind for token in entry.tokens]
            assert kinds.count("rejected") == counted.num_drafted - counted.num_accepted
            assert kinds.count("accepted") == min(counted.num_accepted, counted.num_emitted)


@torch.inference_mode()
def test_p_and_q_are_those_of_two_plain_forward_passes(sampled_run, target):
    """p from the whole model, q from its first layers, at every drafted position, rejected ones behind others too."""
    model = target.hf_model
    for trace in read_traces(sampled_run / "traces.jsonl"):
        if trace.method != "early_exit":
            continue
        text = target.tokenizer(trace.prompt_text, add_special_tokens=False).input_ids
        num_tested = 0
        for entry in trace.rounds:
            drafted = [token for token in entry.tokens if token.kind in ("accepted", "rejected")]
            ids = torch.tensor([text + [token.token_id for token in drafted]])
            output = model(input_ids=ids, output_hidden_states=True)
            p_TV = output.logits[0].softmax(-1)
            q_TV = model.lm_head(model.model.norm(output.hidden_states[EXIT_LAYER]))[0].softmax(-1)
            for place, token in enumerate(drafted, len(text) - 1):
                assert token.p == pytest.approx(float(p_TV[place, token.token_id]), rel=1e-3)
                assert token.q == pytest.approx(float(q_TV[place, token.token_id]), rel=1e-3)
                num_tested += 1
            text += [token.token_id for token in entry.tokens if token.kind != "rejected"]
        assert num_tested > 5


def test_tracing_is_off_the_clock_and_off_when_not_asked_for(tmp_path):
    folder = measured(tmp_path, "measure.trace=0")
    assert not (folder / "traces.jsonl").exists()
    with pytest.raises(UserError, match="measure.trace=1"):
        build_report(folder, "trace", tmp_path / "out")


def test_parts_of_a_character_are_shown_where_it_is_complete():
    class Tokenizer:
        def decode(self, ids, skip_special_tokens):
            return bytes(ids).decode("utf-8", errors="replace")

    ids = list("aé".encode())
    assert [piece(Tokenizer(), ids[:i], ids[i]) for i in range(3)] == ["a", "", "é"]


def test_a_probability_that_is_none_is_left_out():
    assert number(torch.tensor(float("nan"))) is None
    assert number(torch.tensor(0.25)) == 0.25


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
PROBE = """<script>
const seen = [...document.querySelectorAll("section")].map(section => [
  section.querySelector("h2").textContent, section.querySelectorAll("tbody tr").length,
  section.querySelectorAll("tbody .rejected").length, section.querySelector(".output").textContent]);
document.title = JSON.stringify([seen, document.documentElement.scrollWidth <= innerWidth]);
</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no browser on this machine")
def test_a_real_browser_shows_the_real_runs_rounds(sampled_run, tmp_path):
    (page,) = build_report(sampled_run, "trace", tmp_path)
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text().replace("</body>", PROBE))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    command = [str(BROWSER), *options, probed.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    seen, fits = json.loads(done.stdout.split("<title>")[1].split("</title>")[0].replace("&amp;", "&"))
    records = {f"{r.prompt_id}: {r.method}": r for r in read_run(sampled_run).prompts if r.rounds}
    assert fits and len(seen) == 6
    for name, num_rounds, num_rejected, text in seen:
        record = records[name]
        assert num_rounds == len(record.rounds)
        assert num_rejected == sum(entry.num_drafted - entry.num_accepted for entry in record.rounds)
        assert len(text) > 0


class Letters:
    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(97 + token % 26) for token in ids)


@torch.inference_mode()
@pytest.mark.parametrize("acceptance", ["greedy", "rejection", "coupled"])
@pytest.mark.parametrize(
    "lookahead",
    [
        {"kind": "tree", "paths": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [1, 0, 0]]},
        {"kind": "dynamic_tree", "depth": 3, "top_k": 4, "num_nodes": 12},
    ],
    ids=["tree", "dynamic_tree"],
)
def test_of_a_tree_the_path_and_the_likeliest_rejected_candidates_are_shown_with_p_and_q(lookahead, acceptance):
    target = wrap_target(tiny_llama())
    target.tokenizer = Letters()
    drafter = build_drafter("early_exit", target, exit_layer=EXIT_LAYER)
    sampling = Sampling(temperature=0.0 if acceptance == "greedy" else 1.0)
    settings = Settings(sampling, acceptance, ignore_eos=True)
    method = decode_method("tree", target, drafter, build_lookahead(lookahead), settings, 120)
    text, kinds = prompt_ids(9), set()
    output, recorder = method.generate(text, 24, 3), method.trace(text, 24, 3)
    assert recorder.shapes == [(r.num_drafted, r.num_accepted, r.num_emitted) for r in output.rounds]
    for entry in recorder.rounds[:-1]:  # the last one is cut at the limit
        drafted = [token for token in entry.tokens if token.kind in ("accepted", "rejected")]
        ids = torch.tensor([text + [token.token_id for token in drafted]])
        found = target.hf_model(input_ids=ids, output_hidden_states=True)
        p_TV = found.logits[0].softmax(-1)
        hidden = target.hf_model.model.norm(found.hidden_states[EXIT_LAYER])
        q_TV = target.hf_model.lm_head(hidden)[0].softmax(-1)
        for place, token in enumerate(drafted, len(text) - 1):
            assert token.p == pytest.approx(float(p_TV[place, token.token_id]), rel=1e-3)
            assert token.q == pytest.approx(float(q_TV[place, token.token_id]), rel=1e-3)
        kept = [token for token in entry.tokens if token.kind != "rejected"]
        own, end = kept[-1], len(text) - 1 + len(kept) - 1
        assert own.kind in ("correction", "bonus") and own.q is None
        assert own.p == pytest.approx(float(p_TV[end, own.token_id]), rel=1e-3)
        kinds |= {token.kind for token in entry.tokens}
        text = text + [token.token_id for token in kept]
    assert kinds >= {"accepted", "rejected", "correction"}
    assert text[9:] == output.token_ids[: len(text) - 9]
