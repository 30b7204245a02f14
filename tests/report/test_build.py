"""`experiments/report.py`, as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from made_runs import made_records, write_run

from selfspec.errors import UserError
from selfspec.records import TraceRecord, TraceRound, TraceToken, write_traces
from selfspec.report.build import build_report

SCRIPT = Path(__file__).parents[2] / "experiments" / "report.py"


@pytest.fixture
def run_dir(tmp_path):
    return write_run(tmp_path / "outputs" / "study" / "quick-0123abcd", made_records(4, 2))


def add_trace(run_dir):
    rounds = [TraceRound([TraceToken("a", 1, "accepted"), TraceToken("b", 2, "bonus")], 0.1, 0.1, 0.1)]
    write_traces(run_dir / "traces.jsonl", [TraceRecord("p00", "early_exit", "Hi", rounds)])


def test_all_writes_every_file_and_twice_the_same_bytes(run_dir, tmp_path, capsys):
    add_trace(run_dir)
    first = build_report(run_dir, "all", tmp_path / "one")
    second = build_report([run_dir], ["all"], tmp_path / "two")
    names = [path.name for path in first]
    assert set(names) == {
        "comparison.md", "categories.md", "comparison.tex", "categories.tex", "statistics.csv", "speedup.pdf",
        "speedup.png", "acceptance.pdf", "acceptance.png", "time.pdf", "time.png", "trace-quick-0123abcd.html",
    }  # fmt: skip
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == sorted(names)  # and nothing half-written
    assert "early_exit" in capsys.readouterr().out


def test_mistakes_leave_nothing_behind(run_dir, tmp_path):
    out = tmp_path / "out"
    for arguments, message in [
        ((run_dir, "excel", out), "format=excel is unknown; allowed: console, markdown"),
        ((run_dir, [], out), "no format given"),
        ((run_dir, ["csv", "trace"], out), "no trace page to make"),
        ((tmp_path / "nowhere", "csv", out), "no run directory at"),
        (([], "csv", out), "no run directory"),
    ]:
        with pytest.raises(UserError, match=message):
            build_report(*arguments)
        assert not out.exists()


def test_an_output_folder_that_is_a_file_is_named(run_dir, tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(UserError, match=r"cannot write to .*taken.*choose another place with out="):
        build_report(run_dir, "csv", tmp_path / "taken")


# One process for all command lines: starting one costs seconds.
COMMAND_LINES = """
import contextlib, io, json, runpy, sys
for overrides in json.loads(sys.argv[2]):
    sys.argv = [sys.argv[0], sys.argv[1], sys.argv[2]]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        script, given, sys.argv = sys.argv[1], sys.argv[2], [sys.argv[1], *overrides]
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as stop:
            code = stop.code
            if isinstance(code, str):  # as the interpreter does
                print(code, file=err)
                code = 1
    sys.argv = ["", script, given]
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""
MISTAKES = {
    "No value for runs": [],
    "no run directory at 'nowhere'": ["runs=nowhere"],
    "format=excel is unknown": ["runs=outputs", "format=excel"],
    "frmat": ["runs=outputs", "frmat=latex"],
}


def test_command_line_writes_only_what_was_asked_and_mistakes_are_one_line(run_dir, tmp_path):
    command_lines = [["runs=outputs/study", "format=latex", "out=tables/"], *MISTAKES.values()]
    program = [sys.executable, "-c", COMMAND_LINES, str(SCRIPT), json.dumps(command_lines)]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=True)
    good, *bad = [json.loads(line) for line in done.stdout.splitlines()]
    assert good == [0, "tables/comparison.tex\ntables/categories.tex\n", ""]
    for message, (code, out, err) in zip(MISTAKES, bad, strict=True):
        assert (code, out) == (1, "") and message in err and len(err.splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"outputs", "tables"}
