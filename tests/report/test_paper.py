"""A study from nothing to its tables: one command, the same bytes when made again, and a README that nobody edits."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from made_runs import made_records, write_run
from omegaconf import OmegaConf

import selfspec.run
from selfspec.config import CompareConfig, conf_dir, conf_names, resolve
from selfspec.errors import UserError
from selfspec.prompts import check_apart, prompts_from_config
from selfspec.records import TraceRecord, read_run, write_traces
from selfspec.report.headline import END, START, fill_in, headline
from selfspec.report.runs import load_runs
from selfspec.target.fastest import Choice

ROOT = Path(__file__).parents[2]
PATIENCE_S = 600.0  # a machine with more to do than cores is slow without being broken


def test_the_headline_is_the_runs_own_table_and_only_what_is_between_the_marks_changes(tmp_path):
    (run,) = load_runs(write_run(tmp_path / "paper-0123abcd", made_records(4, 1)))
    text = headline(run, "python experiments/compare.py experiment=x", "experiments/x/paper")
    assert "paper-0123abcd" in text and "experiment=x" in text and "early_exit" in text and "Config 0123abcd" in text
    assert max(map(len, text.splitlines())) <= 240 and not any(line != line.rstrip() for line in text.splitlines())
    readme = f"# Title\n\n{START}\n\nold numbers\n\n{END}\n\nEnd.\n"
    filled = fill_in(readme, text, "README.md")
    assert filled.startswith("# Title\n") and filled.endswith("\nEnd.\n") and "old numbers" not in filled
    assert fill_in(filled, text, "README.md") == filled
    for broken in ("no marks", f"{END} {START}", readme + START):
        with pytest.raises(UserError, match="needs one line"):
            fill_in(broken, text, "README.md")


def test_what_earlier_runs_left_goes_and_what_somebody_else_wrote_stays(tmp_path):
    """A new hash makes a new trace page; the old one would stand beside it as if it were the study's."""
    entry, out = paper(), tmp_path / "out"
    first, second, other = (traced(tmp_path / name) for name in ("paper-0000000a", "paper-0000000b", "t1-0000000c"))

    def build(*folders: Path, formats: tuple[str, ...] = ("markdown", "trace")) -> set[str]:
        entry.build(list(folders), entry.PaperConfig([], str(out), list(formats)))
        return {path.name for path in out.iterdir()}

    tables = {"comparison.md", "categories.md", "made_from.json"}
    assert build(first, other, formats=("markdown", "latex", "trace")) == {
        *tables, "comparison.tex", "categories.tex", "trace-paper-0000000a.html", "trace-t1-0000000c.html",
    }  # fmt: skip
    for own in ("notes.md", "trace-mine.html", "trace-paper-00000009.html"):
        (out / own).write_text("a user's")
    users = {"notes.md", "trace-mine.html", "trace-paper-00000009.html"}
    assert "comparison.tex" in build(first, other), "other formats of the same runs are the study's"
    pages = {"trace-paper-0000000b.html", "trace-t1-0000000c.html"}
    assert build(second, other) == tables | users | pages
    assert build(second, other, formats=("console",)) == tables | users | pages
    assert build(second) == tables | users | {"trace-paper-0000000b.html"}
    assert {(out / own).read_text() for own in users} == {"a user's"}


@pytest.mark.parametrize("record", ["[]", "no json", '{"../paper-0000000a/config.yaml": ["old"]}'])
def test_a_record_that_is_none_removes_nothing(record: str, tmp_path):
    entry, out, run = paper(), tmp_path / "out", traced(tmp_path / "paper-0000000a")
    out.mkdir()
    (out / "made_from.json").write_text(record)
    with pytest.raises(UserError, match="is no record of the files beside it"):
        entry.build([run], entry.PaperConfig([], str(out), ["markdown"]))
    assert (run / "config.yaml").exists()


def traced(path: Path) -> Path:
    """A finished run directory with a trace, its hash in its name."""
    write_run(path, made_records(4, 1), config_hash=path.name.rpartition("-")[2])
    write_traces(path / "traces.jsonl", [TraceRecord("p00", "early_exit", "x", [])])
    return path


def test_the_record_of_the_committed_study_is_of_the_files_beside_it():
    folder = ROOT / "experiments" / "smollm2" / "paper"
    recorded = json.loads((folder / "made_from.json").read_text())
    assert set(recorded) == {path.name for path in folder.iterdir()} - {"made_from.json", ".lock"}
    runs = {line.partition(",")[0] for line in (folder / "statistics.csv").read_text().splitlines()[1:]}
    assert {name for of in recorded.values() for name in of} == runs


def test_the_readme_of_the_project_has_the_marks():
    assert fill_in((ROOT / "README.md").read_text(), "x", "README.md").count("x") > 0


def test_the_paper_names_experiments_that_exist_and_reports_no_prompt_it_was_tuned_on():
    names = OmegaConf.load(conf_dir() / "paper.yaml").experiments
    assert set(names) <= set(conf_names("experiment"))
    for name in names:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            config = resolve(CompareConfig, compose("compare", [f"experiment={name}"]))
        assert config.tuned_on == ["selfspec_tune24"] and config.measure.noise_check
        check_apart(prompts_from_config(config.prompts), config.tuned_on)
        for label, drafter in config.drafters.items():  # named for its folder, and for how far it looks
            learned = drafter.get("learned", drafter)
            weights = learned.get("checkpoint") or learned.get("model")
            files = ("model.safetensors", "adapter_model.safetensors")
            assert weights is None or any(is_committed(f"{weights}/{file}") for file in files)
            folder = drafter.get("checkpoint") or drafter.get("model")
            assert folder is None or (ROOT / folder / "config.json").is_file()
            assert folder is None or label.split("_tree")[0].split("_gain")[0] == folder.rpartition("/")[2]


def is_committed(file: str) -> bool:
    """Whether a clone has it; outside a clone, whether it is there."""
    if not (ROOT / ".git").exists():
        return (ROOT / file).is_file()
    found = subprocess.run(["git", "ls-files", file], cwd=ROOT, capture_output=True, text=True, check=True)
    return found.stdout.strip() == file


def paper() -> ModuleType:
    spec = importlib.util.spec_from_file_location("paper_entry", ROOT / "experiments" / "paper.py")
    assert spec is not None and spec.loader is not None
    entry = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = entry  # dataclasses look their module up
    spec.loader.exec_module(entry)
    return entry


def test_a_measurement_that_a_killed_paper_left_is_waited_for(tmp_path, monkeypatch, capsys):
    """The lock lives on in compare.py, here a process that takes its time, after the process that took it is gone."""
    entry = paper()
    (tmp_path / "experiments").mkdir()
    slow = "import sys, time; print('begun', flush=True); sys.stdin.read(); open(sys.argv[1], 'w')"
    (tmp_path / "experiments" / "compare.py").write_text(slow)
    monkeypatch.setattr(entry, "ROOT", tmp_path)
    ended = tmp_path / "ended"

    def left_behind(command: list[str], **given: Any) -> subprocess.CompletedProcess[str]:
        given.pop("check")
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **given)
        assert child.stdout is not None and child.stdout.readline() == b"begun\n"
        children.append(child)
        return subprocess.CompletedProcess(command, 0)

    children: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(entry, "subprocess", SimpleNamespace(run=left_behind))
    with entry.alone(tmp_path / "out") as lock:
        entry.measure([str(ended)], lock)
    (child,) = children
    assert child.stdin is not None
    threading.Timer(0.3, child.stdin.close).start()
    with entry.alone(tmp_path / "out"):
        assert ended.exists()
    assert "waiting for its end" in capsys.readouterr().out
    child.wait()


def test_the_dtype_that_is_faster_is_decided_once_for_a_study(monkeypatch):
    """By the parent: the process that measures would otherwise look at the clock again, and write elsewhere."""
    entry, folders = paper(), []
    arguments = ["experiment=smoke_tiny", "runtime=fastest"]
    for dtype in (torch.bfloat16, torch.float32):
        for module in (selfspec.run, selfspec.target.loading):
            monkeypatch.setattr(module, "fastest_dtype", lambda device, dtype=dtype: Choice(dtype, "by this clock"))
        config = entry.settled(arguments)
        arguments = entry.decided(arguments, config)
        folders.append(entry.choose_folder(config))
    assert config.runtime.dtype == "bfloat16" and folders[0] == folders[1]


@pytest.mark.slow
def test_killed_and_started_again_it_measures_each_prompt_once_and_rebuilds_the_same_bytes(tmp_path):
    """`kill -9` of paper.py, which leaves compare.py, and then of compare.py, too, in the middle of its prompts."""
    sizes = f'["output_dir={tmp_path}/runs","max_new_tokens=150","ignore_eos=true"]'
    script = str(ROOT / "experiments" / "paper.py")
    command = [sys.executable, script, "experiments=[smoke_tiny]", f"overrides={sizes}", "readme=null"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def start(out: str) -> subprocess.Popen[str]:
        return subprocess.Popen([*command, f"out={tmp_path / out}"], cwd=tmp_path, env=environment, text=True)

    def results() -> list[bytes]:
        file = next((tmp_path / "runs").rglob("prompts.jsonl"), None)
        return [] if file is None else file.read_bytes().splitlines(keepends=True)

    process = start("one")
    children: list[int] = []
    try:
        wait_until(lambda: len(results()) >= 3 or process.poll() is not None)
        children += map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        process.kill()
        process.wait()
        wait_until(lambda: len(results()) >= 5)
    finally:
        process.kill()
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    (child,) = children
    wait_until(lambda: not is_running(child))
    survived = b"".join(line for line in results() if line.endswith(b"\n"))
    assert not list((tmp_path / "runs").rglob("DONE")), "too fast to be killed"
    assert not list((tmp_path / "one").glob("*.md"))

    for out in ("one", "two"):
        assert start(out).wait(PATIENCE_S) == 0
    (done,) = (tmp_path / "runs").rglob("DONE")
    keys = [record.key for record in read_run(done.parent).prompts]
    everything = {*product({key[0] for key in keys}, {key[1] for key in keys}, {0})}
    assert len(keys) == len(set(keys)) and set(keys) == everything and len({key[0] for key in keys}) == 4
    assert b"".join(results()).startswith(survived)
    made = [{p.name: p.read_bytes() for p in (tmp_path / out).iterdir() if p.name != ".lock"} for out in ("one", "two")]
    assert made[0] == made[1]
    assert {"comparison.md", "costs.tex", "statistics.csv", "speedup.pdf"} <= set(made[0])
    assert any(name.startswith("trace-") for name in made[0])


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(what: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)
