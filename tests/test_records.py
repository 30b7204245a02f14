"""Run directories: written so that no crash loses or doubles a result, read so that no damage goes unnoticed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from selfspec.errors import UserError
from selfspec.records import (
    PromptRecord,
    RoundRecord,
    RunWriter,
    TraceRecord,
    TraceRound,
    TraceToken,
    read_run,
    read_traces,
    take_lock,
    wait_for_lock,
    write_traces,
)

ROUNDS = [RoundRecord(4, 2, 3, 0.1, 0.2, 0.01), RoundRecord(4, 4, 1, 0.1, 1 / 3, 0.0)]


def made(prompt_id, method="ar", repeat=0, **changes):
    times = {"prefill_s": 0.1, "ttft_s": 0.1 + 0.2, "decode_s": 0.4, "total_s": 0.5}
    head = {"category": "chat", "num_prompt_tokens": 5, "token_ids": [1, 2, 3, 4], "text": 'a\n"b" \u2028 é'}
    values = {**head, "finish_reason": "length", "lossy": False, "rounds": list(ROUNDS), **times, **changes}
    return PromptRecord(prompt_id=prompt_id, method=method, repeat=repeat, **values)


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run-0123abcd"


def finished_run(path, records):
    with RunWriter(path) as writer:
        for record in records:
            writer.append(record)
        writer.write_text("config.yaml", "seed: 1\n")
        writer.write_text("provenance.json", "{}\n")
        writer.finish({"speed": 1.5})
    return path


def test_what_is_written_is_read_back_exactly(run_dir):
    records = [
        made("a", alpha_sum=1 / 3, alpha_count=2),
        made("b", peak_host_bytes=7, synthetic=True),
        made("a", "hf", rounds=[]),
    ]
    run = read_run(finished_run(run_dir, records))
    assert run.prompts == records
    assert run.rounds[("a", "ar", 0)] == ROUNDS
    assert run.config == {"seed": 1} and run.config_hash == "0123abcd" and run.finished
    assert run.summary == {"speed": 1.5, "schema_version": 1}


def test_every_truncation_a_crash_can_leave_resumes_without_loss_or_double(tmp_path):
    """Bytes reach the disk in order: rounds line, prompt line, rounds line, ... Cut that stream at every byte."""
    records = [made("a"), made("b"), made("c")]
    whole = tmp_path / "whole-0123abcd"
    with RunWriter(whole) as writer:
        for record in records:
            writer.append(record)
    lines = {name: (whole / name).read_bytes().splitlines(keepends=True) for name in ("rounds.jsonl", "prompts.jsonl")}
    stream = [(name, lines[name][index]) for index in range(3) for name in ("rounds.jsonl", "prompts.jsonl")]
    total = sum(len(line) for _, line in stream)
    for cut in range(0, total + 1, 17):
        run_dir = tmp_path / f"cut{cut}-0123abcd"
        run_dir.mkdir()
        left = cut
        for name, line in stream:
            with open(run_dir / name, "ab") as handle:
                handle.write(line[:left])
            left = max(0, left - len(line))
        seen = read_run(run_dir, allow_unfinished=True).prompts
        with RunWriter(run_dir) as writer:
            assert writer.done_keys() == {record.key for record in seen}
            assert len(seen) >= sum(cut >= sum(len(line) for _, line in stream[: 2 * i + 2]) for i in range(3))
            for record in records:
                if record.key not in writer.done_keys():
                    writer.append(record)
        assert read_run(run_dir, allow_unfinished=True).prompts == records
        assert (run_dir / "rounds.jsonl").read_bytes() == (whole / "rounds.jsonl").read_bytes()


WRITE_FOREVER = """
import sys; from test_records import made; from selfspec.records import RunWriter
with RunWriter(sys.argv[1]) as writer:
    for index in range(10**9):
        if (str(index), "ar", 0) not in writer.done_keys():
            writer.append(made(str(index)))
"""


def test_kill_minus_nine_loses_nothing_that_was_reported_done(run_dir):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(["tests", "."])}
    so_far = 0
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", WRITE_FOREVER, str(run_dir)], env=env, cwd=os.getcwd())
        deadline = time.monotonic() + 60
        path = run_dir / "prompts.jsonl"
        while not path.exists() or path.read_bytes().count(b"\n") < so_far + 20:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        seen = [record.prompt_id for record in read_run(run_dir, allow_unfinished=True).prompts]
        assert seen == [str(index) for index in range(len(seen))] and len(seen) >= so_far + 20
        so_far = len(seen)
    with RunWriter(run_dir) as writer:  # the lock died with the process
        assert len(writer.done_keys()) == so_far


def test_second_writer_is_refused_while_the_first_lives(run_dir):
    me = f"being written by .*process {os.getpid()} on .*, since .*; wait for it, stop it, or choose another name"
    with RunWriter(run_dir), pytest.raises(UserError, match=me):
        RunWriter(run_dir)
    RunWriter(run_dir).close()


HOLD = """
import sys, time
from pathlib import Path
from selfspec.records import take_lock
lock = take_lock(Path(sys.argv[1]), "-")
print("held", flush=True)
time.sleep(600)
"""


def test_a_lock_names_the_process_that_has_it_and_ends_with_it(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    try:
        with pytest.raises(UserError, match=rf"written by -c \(process {holder.pid} on "):
            take_lock(tmp_path, "-")
        waited: list[str] = []
        threading.Timer(0.2, holder.kill).start()
        with wait_for_lock(tmp_path, waited.append):
            assert holder.wait(60) == -signal.SIGKILL and f"process {holder.pid} on" in waited[0]
            with pytest.raises(UserError, match=f"process {os.getpid()} on"):  # one name, the new one's
                take_lock(tmp_path, "-")
    finally:
        holder.kill()
        holder.stdout.close()
    assert (tmp_path / ".lock").read_text().count("\n") == 1


def test_a_write_that_fails_halfway_leaves_no_half_line(run_dir, monkeypatch):
    real_write = os.write

    def full_disk(fd, data):
        if len(data) > 100:
            return real_write(fd, data[:100])
        raise OSError(28, "No space left on device")

    with RunWriter(run_dir) as writer:
        writer.append(made("a"))
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full_disk)
            with pytest.raises(OSError, match="No space left"):
                writer.append(made("b"))
        writer.append(made("b"))
    assert [record.prompt_id for record in read_run(run_dir, allow_unfinished=True).prompts] == ["a", "b"]


def test_doubled_result_is_refused_on_writing_and_on_reading(run_dir):
    finished_run(run_dir, [made("a")])
    with RunWriter(run_dir) as writer, pytest.raises(UserError, match="finished run"):
        writer.append(made("b"))
    (run_dir / "DONE").unlink()
    with RunWriter(run_dir) as writer, pytest.raises(UserError, match="already holds prompt 'a'"):
        writer.append(made("a"))
    line = (run_dir / "prompts.jsonl").read_bytes()
    (run_dir / "prompts.jsonl").write_bytes(line * 2)
    with pytest.raises(UserError, match=r"prompts.jsonl:2 repeats prompt 'a'"):
        read_run(run_dir, allow_unfinished=True)


def test_nan_never_reaches_a_run_directory(run_dir):
    with RunWriter(run_dir) as writer:
        with pytest.raises(ValueError, match="not JSON compliant"):
            writer.append(made("a", total_s=float("nan")))
        assert writer.done_keys() == set()
    assert read_run(run_dir, allow_unfinished=True).prompts == []


def damage(path, old, new):
    path.write_bytes(path.read_bytes().replace(old, new, 1))


DAMAGE = {
    "no DONE file": lambda run: (run / "DONE").unlink(),
    "lacks summary.json": lambda run: (run / "summary.json").unlink(),
    "lacks config.yaml": lambda run: (run / "config.yaml").unlink(),
    "lacks provenance.json": lambda run: (run / "provenance.json").unlink(),
    "summary.json has schema version 2": lambda run: damage(run / "summary.json", b'_version": 1', b'_version": 2'),
    "prompts.jsonl:1 has schema version 2": lambda run: damage(run / "prompts.jsonl", b'_version": 1', b'_version": 2'),
    "prompts.jsonl:1 is damaged": lambda run: damage(run / "prompts.jsonl", b"{", b"["),
    r"missing or unknown fields \['total_s'\]": lambda run: damage(run / "prompts.jsonl", b', "total_s": 0.5', b""),
    "prompts.jsonl:1: lossy should be bool": lambda run: damage(run / "prompts.jsonl", b'lossy": false', b'lossy": 0'),
    "is damaged .NaN is not a number": lambda run: damage(run / "prompts.jsonl", b'total_s": 0.5', b'total_s": NaN'),
    "no line for prompt 'a'": lambda run: damage(run / "rounds.jsonl", b'"a"', b'"z"'),
    "a round should be a list": lambda run: damage(run / "rounds.jsonl", b"[4, 2, 3, ", b"[4, "),
    "num_drafted should be int": lambda run: damage(run / "rounds.jsonl", b"[4, 2, 3, ", b"[4.5, 2, 3, "),
    "DONE counts 2 results but prompts.jsonl holds 1": lambda run: (run / "prompts.jsonl").write_bytes(
        (run / "prompts.jsonl").read_bytes().splitlines(keepends=True)[0]
    ),
    "config.yaml is damaged": lambda run: (run / "config.yaml").write_text("a: [1"),
    "config.yaml is damaged .'utf-8' codec": lambda run: (run / "config.yaml").write_bytes(b"a: \xff"),
    "config.yaml should hold a mapping": lambda run: (run / "config.yaml").write_text("- 1"),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damage_is_named_and_never_read_over(run_dir, message):
    finished_run(run_dir, [made("a"), made("b")])
    DAMAGE[message](run_dir)
    with pytest.raises(UserError, match=message):
        read_run(run_dir)


def test_missing_directory_and_missing_hash_are_named(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(UserError, match="config hash"):
        read_run(finished_run(tmp_path / "plain", [made("a")]))


def test_a_last_line_of_nulls_after_a_power_cut_is_dropped(run_dir):
    with RunWriter(run_dir) as writer:
        writer.append(made("a"))
    with open(run_dir / "prompts.jsonl", "ab") as handle:
        handle.write(b"\0" * 40 + b"\n")
    assert len(read_run(run_dir, allow_unfinished=True).prompts) == 1
    with RunWriter(run_dir) as writer:
        writer.append(made("b"))
    assert [record.prompt_id for record in read_run(run_dir, allow_unfinished=True).prompts] == ["a", "b"]


def test_opening_a_finished_run_changes_nothing(run_dir):
    finished_run(run_dir, [made("a")])
    with open(run_dir / "rounds.jsonl", "ab") as handle:
        handle.write(b'{"torn')
    before = (run_dir / "rounds.jsonl").read_bytes()
    RunWriter(run_dir).close()
    assert (run_dir / "rounds.jsonl").read_bytes() == before


def test_traces_round_trip_and_a_damaged_one_is_named(tmp_path):
    tokens = [TraceToken("The", 5, "accepted", 0.5, 0.25), TraceToken("\n", 6, "bonus")]
    trace = TraceRecord("a", "early_exit", "Say it.", [TraceRound(tokens, 0.1, 0.2, 0.0)])
    write_traces(tmp_path / "traces.jsonl", [trace, trace])
    assert read_traces(tmp_path / "traces.jsonl") == [trace, trace]
    (tmp_path / "traces.jsonl").write_text(json.dumps({"schema_version": 1, "rounds": [{}]}) + "\n")
    with pytest.raises(UserError, match=r"traces.jsonl:1 is not a trace"):
        read_traces(tmp_path / "traces.jsonl")
