"""The main job end to end on a tiny random target: what it writes, how it resumes, how it refuses."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

import selfspec.run
from selfspec.config import CompareConfig, RandomShape, TargetConfig, conf_dir, config_hash, resolve
from selfspec.errors import UserError
from selfspec.records import RunWriter, read_run
from selfspec.run import run_compare
from selfspec.target.byte_tokenizer import byte_tokenizer
from selfspec.target.loading import random_model

REPO = Path(__file__).parent.parent
METHODS = ["hf_generate", "ar", "early_exit", "ngram"]
NUM_RESULTS = 4 * (len(METHODS) + 1)  # and `ar_again`, the noise check


@pytest.fixture
def compare(tmp_path: Path):
    """`compare("seed=1")` runs the tiny experiment in this process and returns (summary, run directory)."""

    def run(*overrides: str) -> tuple[dict, Path]:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            composed = compose("compare", ["experiment=smoke_tiny", f"output_dir={tmp_path}", *overrides])
        summary = run_compare(composed)
        return summary, max(tmp_path.rglob("DONE"), key=lambda path: path.stat().st_mtime_ns).parent

    return run


def _command(tmp_path: Path, *overrides: str) -> list[str]:
    script = str(REPO / "experiments" / "compare.py")
    return [sys.executable, script, "experiment=smoke_tiny", f"output_dir={tmp_path}", *overrides]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}


def _run(tmp_path: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _command(tmp_path, *overrides), cwd=tmp_path, env=_environment(), capture_output=True, text=True, timeout=300
    )


def _keys(folder: Path) -> list[tuple[str, str, int]]:
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    return [(entry["prompt_id"], entry["method"], entry["repeat"]) for entry in map(json.loads, lines)]


def test_a_run_directory_holds_everything(compare) -> None:
    summary, folder = compare()
    assert list(summary["methods"]) == METHODS
    assert {path.name for path in folder.iterdir()} >= {
        "config.yaml", "overrides.yaml", "provenance.json", "rounds.jsonl", "prompts.jsonl", "summary.json", "DONE",
        "traces.jsonl",
    }  # fmt: skip
    run = read_run(folder)
    assert len(run.prompts) == len({record.key for record in run.prompts}) == NUM_RESULTS
    assert run.provenance["config_hash"].startswith(folder.name.rpartition("-")[2])
    assert run.provenance["seeds"] == {"seed": 0}
    stored = resolve(CompareConfig, OmegaConf.load(folder / "config.yaml"))
    assert config_hash(stored) == run.provenance["config_hash"], "config.yaml alone repeats the run"
    for record in run.prompts:
        assert record.equals_ar is (None if record.method == "ar" else True)
        assert record.peak_host_bytes is None or record.peak_host_bytes > 50e6


def test_the_done_mark_is_written_last(compare) -> None:
    _, folder = compare()
    done = (folder / "DONE").stat().st_mtime_ns
    assert all(path.stat().st_mtime_ns <= done for path in folder.iterdir() if path.name != ".lock")


def test_a_finished_run_is_shown_and_not_measured_again(compare, monkeypatch, capsys) -> None:
    first, folder = compare()
    before = (folder / "prompts.jsonl").read_bytes()
    table = capsys.readouterr().out
    monkeypatch.setattr(selfspec.run, "assemble", lambda config: pytest.fail("loaded a model to show a table"))
    second, _ = compare()
    assert second == first
    assert (folder / "prompts.jsonl").read_bytes() == before
    again = capsys.readouterr().out
    assert "force=true" in again
    assert again.splitlines()[:12] == table.splitlines()[:12]


def test_force_measures_into_a_fresh_directory(compare) -> None:
    _, folder = compare()
    before = (folder / "prompts.jsonl").read_bytes()
    _, fresh = compare("force=true")
    assert fresh.name == f"{folder.name}-2"
    assert read_run(fresh).finished
    assert (folder / "prompts.jsonl").read_bytes() == before
    _, latest = compare()
    assert latest == fresh, "without force the latest is shown"


def test_killed_between_the_last_result_and_the_done_mark(compare, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(RunWriter, "finish", lambda writer, summary: (_ for _ in ()).throw(OSError("killed")))
    with pytest.raises(OSError, match="killed"):
        compare()
    monkeypatch.undo()
    monkeypatch.setattr(selfspec.run, "measure", lambda *a, **k: pytest.fail("measured what was there already"))
    _, folder = compare()
    assert len(_keys(folder)) == NUM_RESULTS


def test_an_interrupted_run_says_that_it_can_go_on(compare, monkeypatch, capsys, tmp_path: Path) -> None:
    def stop_after_three(tracker: object, record: object) -> None:
        if sum(1 for _ in next(tmp_path.rglob("prompts.jsonl")).open()) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(selfspec.run, "log_result", stop_after_three)
    with pytest.raises(KeyboardInterrupt):
        compare()
    assert "goes on where it stopped" in capsys.readouterr().err
    monkeypatch.undo()
    _, folder = compare()
    assert len(_keys(folder)) == len(set(_keys(folder))) == NUM_RESULTS
    provenance = json.loads((folder / "provenance.json").read_text())
    assert len(provenance["resumed"]) == 1


def test_a_run_is_not_resumed_with_other_prompts_under_the_same_path(compare, monkeypatch, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_id": "a", "prompt": "One."}\n')
    arguments = ("prompts=jsonl", f"prompts.path={prompts}")
    monkeypatch.setattr(RunWriter, "finish", lambda writer, summary: (_ for _ in ()).throw(OSError("killed")))
    with pytest.raises(OSError, match="killed"):
        compare(*arguments)
    monkeypatch.undo()
    prompts.write_text('{"prompt_id": "a", "prompt": "Two."}\n')
    with pytest.raises(UserError, match="begun with other contents of: prompt_token_ids, prompts"):
        compare(*arguments)


@pytest.mark.parametrize("same_code", [False, True])
def test_fingerprints_that_other_code_named_otherwise_are_not_called_changed(
    same_code: bool, compare, capsys, tmp_path: Path
) -> None:
    _, folder = compare()
    (folder / "DONE").unlink()
    path = folder / "provenance.json"
    provenance = json.loads(path.read_text())
    name = next(name for name in provenance["fingerprints"] if name != "target")
    provenance["fingerprints"]["named otherwise"] = provenance["fingerprints"].pop(name)
    if not same_code:
        provenance["git"] = {"commit": "another"}
    path.write_text(json.dumps(provenance))
    if same_code:
        with pytest.raises(UserError, match=f"other contents of: {name}"):
            compare()
    else:
        compare()
        assert "begun by other code" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.slow
def test_kill_9_loses_nothing_and_doubles_nothing(tmp_path: Path) -> None:
    overrides = ["max_new_tokens=150", "ignore_eos=true"]
    process = subprocess.Popen(_command(tmp_path, *overrides), cwd=tmp_path, env=_environment())
    deadline = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline:
        written = next(tmp_path.rglob("prompts.jsonl"), None)
        if written is not None and written.read_bytes().count(b"\n") >= 6:
            break
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (folder,) = {path.parent for path in tmp_path.rglob("prompts.jsonl")}
    assert not (folder / "DONE").exists(), "the run was too fast to be killed"
    survived = (folder / "prompts.jsonl").read_bytes()
    survived = survived[: survived.rfind(b"\n") + 1]

    resumed = _run(tmp_path, *overrides)
    assert resumed.returncode == 0, resumed.stderr
    assert (folder / "prompts.jsonl").read_bytes().startswith(survived), "finished results were touched"
    keys = _keys(folder)
    assert len(keys) == len(set(keys)) == NUM_RESULTS
    assert read_run(folder).finished


def test_a_mismatch_is_written_down_and_then_fails_the_run(compare, monkeypatch, tmp_path: Path) -> None:
    real = selfspec.run.assemble

    def with_a_wrong_drafter(config: CompareConfig):
        bench = real(config)
        method = next(method for method in bench.methods if method.label == "early_exit")
        right = method.generate

        def wrong(prompt_ids: list[int], max_new_tokens: int, seed: int):
            output = right(prompt_ids, max_new_tokens, seed)
            output.token_ids[-1] = (output.token_ids[-1] + 1) % 512
            return output

        method.generate = wrong
        return bench

    monkeypatch.setattr(selfspec.run, "assemble", with_a_wrong_drafter)
    with pytest.raises(UserError, match=r"not the target's own: early_exit on 4 of 4 prompts"):
        compare()
    (done,) = tmp_path.rglob("DONE")
    summary = json.loads((done.parent / "summary.json").read_text())
    differing = summary["divergence"]["differing"]
    assert {entry["method"] for entry in differing} == {"early_exit"}
    assert all(entry["divergence_class"] == "mismatch" and entry["top2_margin"] > 0 for entry in differing)
    with pytest.raises(UserError, match="not the target's own"):  # showing it again says it again
        compare()


def test_several_turns_continue_from_the_same_answers(compare, tmp_path: Path) -> None:
    lines = [{"prompt_id": "a", "turns": ["One.", "Two."]}, {"prompt_id": "b", "turns": ["Only one."]}]
    prompts = tmp_path / "turns.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, folder = compare("prompts=jsonl", f"prompts.path={prompts}", "max_new_tokens=4")
    run = read_run(folder)
    assert {record.prompt_id for record in run.prompts} == {"a", "a#2", "b"}
    assert len({record.num_prompt_tokens for record in run.prompts if record.prompt_id == "a#2"}) == 1


def test_a_tracker_mirrors_config_rounds_results_and_summary(compare) -> None:
    summary, folder = compare("tracking=jsonl")
    events = [json.loads(line) for line in (folder / "tracking.jsonl").read_text().splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds[0] == "start" and kinds[-2:] == ["summary", "finish"]
    assert events[0]["config"]["target"]["name"] == "random-tiny"
    assert kinds.count("prompt") == NUM_RESULTS
    assert kinds.count("round") == sum(len(record.rounds) for record in read_run(folder).prompts)
    assert events[-1]["exit_code"] == 0
    assert events[-2]["values"]["methods"]["ar"]["num_tokens"] == summary["methods"]["ar"]["num_tokens"]


@pytest.mark.slow
def test_weights_and_biases_offline_needs_no_account(compare) -> None:
    _, folder = compare("tracking=wandb_offline")
    assert list(folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert read_run(folder).finished


@pytest.mark.slow
def test_watching_one_prompt_prints_its_text_and_a_summary_line(tmp_path: Path) -> None:
    overrides = ["prompt=hello", "target=random-tiny", "drafter=early_exit", "drafter.exit_layer=2", "max_new_tokens=9"]
    command = [sys.executable, str(REPO / "experiments" / "generate.py"), *overrides, "runtime=cpu_float32"]
    done = subprocess.run(command, cwd=tmp_path, env=_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("9 tokens in ")
    assert "ended by length" in last
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text", ["Hello, world", 'say "a, b" or C:\\', "Don't [stop", "f(x) = {1: 2}, y", "5", 'two\nlines, "quoted"', "\\"]
)
def test_a_prompt_on_the_command_line_is_taken_as_it_stands(text: str) -> None:
    sys.path.append(str(REPO / "experiments"))
    as_typed = importlib.import_module("generate").as_typed
    (argument,) = as_typed([f"prompt={text}"])
    assert OverridesParser.create().parse_override(argument).value() == text
    assert as_typed([argument, "drafter=ngram"]) == [argument, "drafter=ngram"]


@pytest.mark.slow
def test_one_bad_job_of_a_sweep_does_not_stop_the_others(tmp_path: Path) -> None:
    done = _run(tmp_path, "measure.max_prompts=1", "drafters.early_exit.exit_layer=2,9,3", "--multirun")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: exit_layer=9")
    assert len(list(tmp_path.rglob("DONE"))) == 2


# ---- bad input

BAD_INPUT = {
    "drafters.early_exit.exit_layer=0": "1 to 3",
    "drafters.early_exit.exit_layer=4": "1 to 3",
    "drafters.early_exit.exit_layer=5": "1 to 3",
    "+drafters.early_exit.exit_layr=2": "exit_layer",
    "+drafters.x.kind=eagle": "eagle3",
    "max_new_tokens=5000": "2048",
    "sampling.temperature=-1": "temperature",
    "sampling.top_p=0": "top_p",
    "prompts.name=selfspec49": "selfspec48",
    "tracking.kind=tensorboard": "wandb_offline",
    "lookahead.kind=adaptive": "Allowed: adaptive_threshold",
    "drafter=independent drafter.model=smollm2": "smollm2-135m",
    "target.shape.num_heads=5 target.shape.num_kv_heads=5": "target.shape.hidden_size=64",
    "target.shape.num_kv_heads=3": "target.shape.num_heads=4",
    "target=hf target.path=/no/such/folder": "No model folder at /no/such/folder",
    "target=hf target.path=./nothing": "No model folder at nothing",
}


@pytest.mark.parametrize("overrides", BAD_INPUT)
def test_bad_input_names_what_is_allowed_and_writes_nothing(compare, overrides: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        compare(*overrides.split())
    assert BAD_INPUT[overrides] in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("target=smolm2-135m", "Did you mean 'smollm2-135m'?"),
        ("max_new_tokns=3", "Did you mean 'max_new_tokens'?"),
        ("runtime.dtype=float16", "Allowed on cpu: float32, bfloat16, float64"),
        ("drafters.early_exit.exit_layer=4", "1 to 3"),
    ],
)
def test_user_errors_are_one_line_and_exit_code_1(override: str, allowed: str, tmp_path: Path) -> None:
    done = _run(tmp_path, override)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert allowed in line
    assert not list(tmp_path.iterdir()), "something was left behind"


def test_a_draft_model_too_short_for_the_prompts_is_refused_before_a_run_directory_is_made(compare, tmp_path) -> None:
    short = random_model(
        TargetConfig(kind="random", shape=RandomShape(vocab_size=512, num_layers=1, max_positions=300))
    )
    model = tmp_path / "short"
    short.save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    with pytest.raises(UserError, match="has 300 positions"):
        compare("drafter=independent", f"drafter.model={model}", "measure.max_prompts=48")
    assert [path.name for path in tmp_path.iterdir()] == ["short"]


def test_a_place_that_cannot_be_written_to_is_a_user_error(compare, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write to .*output_dir"):
        compare(f"output_dir={tmp_path / 'file'}")
