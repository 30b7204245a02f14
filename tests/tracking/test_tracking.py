"""Trackers see every round and result, hold no secret, and can neither stop nor slow a run."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from wandb_log import read_offline_run

from selfspec.errors import UserError
from selfspec.records import PromptRecord, RoundRecord
from selfspec.tracking import KINDS, Tracker, build_tracker, log_result, tracker_from_config
from selfspec.tracking.base import ROUND_METRICS, flatten, prompt_metrics
from selfspec.tracking.guard import GuardedTracker
from selfspec.tracking.null import NullTracker
from selfspec.tracking.wandb import WandbTracker, run_id

CONFIG = {"target": {"kind": "random", "hf_token": "s3cret"}, "max_new_tokens": 16, "seeds": [1, 2]}
SUMMARY = {"methods": {"ar": {"al_pooled": 1.0}, "early_exit": {"al_pooled": 2.5, "speedup_ci": [1.1, 1.3]}}}
HASH = "0123456789abcdef"


def result(method: str = "early_exit", prompt_id: str = "math-01", num_rounds: int = 3) -> PromptRecord:
    return PromptRecord(
        prompt_id=prompt_id,
        category="math",
        method=method,
        repeat=0,
        num_prompt_tokens=7,
        token_ids=list(range(3 * num_rounds)),
        text="the private answer",
        finish_reason="length",
        lossy=False,
        prefill_s=0.25,
        ttft_s=0.3,
        decode_s=1.25,
        total_s=1.5,
        alpha_sum=3.0,
        alpha_count=4,
        equals_ar=True,
        rounds=[RoundRecord(4, 2, 3, 0.1 * (index + 1), 0.2, 0.01) for index in range(num_rounds)],
    )


def whole_run(tracker: Tracker, run_dir: Path, exit_code: int = 0) -> None:
    tracker.start(CONFIG, run_name="quick", group="smollm2", job_type="compare", run_dir=run_dir, config_hash=HASH)
    for prompt_id in ("math-01", "math-02"):
        log_result(tracker, result("ar", prompt_id, num_rounds=2))
        log_result(tracker, result("early_exit", prompt_id, num_rounds=3))
    tracker.log({"loss": 2.5, "lr": 0.1}, step=10)
    tracker.summary(SUMMARY)
    tracker.finish(exit_code)


def test_an_offline_wandb_run_read_back_holds_config_rounds_prompts_and_summary(tmp_path: Path):
    whole_run(build_tracker("wandb_offline", project="papers", tags=["a", "b"]), tmp_path)
    run = read_offline_run(tmp_path)

    assert run.config["max_new_tokens"] == 16
    assert run.config["target"] == {"kind": "random", "hf_token": "[redacted]"}
    assert run.config["config_hash"] == HASH
    assert (run.run.project, run.run.run_group, run.run.job_type) == ("papers", "smollm2", "compare")
    assert (run.run.display_name, list(run.run.tags)) == ("quick", ["a", "b"])
    assert run.run.run_id == run_id(HASH, tmp_path)

    rounds = run.rows("early_exit/round/")
    assert [row["index"] for row in rounds] == list(range(6))
    assert [row["prompt_id"] for row in rounds] == ["math-01"] * 3 + ["math-02"] * 3
    expected = [4, 2, 3, 0.1, 0.2, 0.01]
    assert [rounds[0][name] for name in ROUND_METRICS] == pytest.approx(expected)
    assert [row["draft_s"] for row in rounds[:3]] == pytest.approx([0.1, 0.2, 0.3])
    assert len(run.rows("ar/round/")) == 4

    prompts = run.rows("early_exit/prompt/")
    assert len(prompts) == 2
    wanted = {"tokens_per_s": 6.0, "acceptance_length": 3.0, "alpha": 0.75, "equals_ar": 1.0, "ttft_s": 0.3}
    assert {key: prompts[0][key] for key in wanted} == pytest.approx(wanted)

    assert any(row.get("loss") == 2.5 and row.get("step") == 10 for row in run.history)
    assert run.metrics["early_exit/round/*"] == "early_exit/round/index"
    assert run.metrics["loss"] == "step"
    assert run.summary["methods/early_exit/al_pooled"] == 2.5
    assert run.summary["methods/early_exit/speedup_ci/1"] == 1.3
    assert run.exit_code == 0


def test_an_offline_wandb_run_holds_no_secret_text_host_output_or_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(socket, "gethostname", lambda: "alices-laptop")
    monkeypatch.setenv("SOME_SERVICE_TOKEN", "s3cret-in-the-environment")
    monkeypatch.setattr(sys, "argv", ["compare.py", "tracking.api_key=s3cret"])
    whole_run(build_tracker("wandb_offline"), tmp_path)
    run = read_offline_run(tmp_path)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            for word in (b"s3cret", b"alices-laptop", b"the private answer"):
                assert word not in path.read_bytes(), (path, word)
    assert run.run.host not in ("", socket.gethostname())
    assert run.kinds.isdisjoint({"output", "output_raw", "stats", "environment"})
    captured = capsys.readouterr()
    assert captured.out == ""


def test_wandb_itself_can_read_the_offline_run(tmp_path: Path):
    whole_run(build_tracker("wandb_offline"), tmp_path)
    (folder,) = tmp_path.glob("wandb/offline-run-*")
    command = [sys.executable, "-m", "wandb", "sync", "--dry-run", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert run_id(HASH, tmp_path) in done.stdout + done.stderr


def test_a_failed_run_says_so(tmp_path: Path):
    whole_run(build_tracker("wandb_offline"), tmp_path, exit_code=1)
    assert read_offline_run(tmp_path).exit_code == 1


def test_wandb_id_is_the_config_hash_at_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = run_id(HASH, tmp_path / "a")
    assert first == run_id(HASH, tmp_path / "b" / ".." / "a")
    assert first.startswith(HASH[:8])
    others = {run_id("f" * 16, tmp_path / "a"), run_id(HASH, tmp_path / "b")}
    monkeypatch.setattr(socket, "gethostname", lambda: "another-host")
    others.add(run_id(HASH, tmp_path / "a"))
    assert len(others | {first}) == 4


def test_online_without_a_login_warns_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    for name, value in {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "WANDB_MODE": "online"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    import wandb

    monkeypatch.setattr(wandb, "login", lambda **kwargs: False)
    whole_run(build_tracker("wandb"), tmp_path / "run")
    assert len(caplog.records) == 1
    assert "wandb login" in caplog.text and "wandb_offline" in caplog.text
    assert not (tmp_path / "run").exists()


def test_jsonl_has_one_line_per_event_and_a_resumed_run_appends(tmp_path: Path):
    for _ in range(2):
        whole_run(build_tracker("jsonl"), tmp_path)
    events = [json.loads(line) for line in (tmp_path / "tracking.jsonl").read_text().splitlines()]
    names = [event["event"] for event in events]
    once = ["start", *(["round"] * 2 + ["prompt"] + ["round"] * 3 + ["prompt"]) * 2, "log", "summary", "finish"]
    assert names == once * 2
    assert set(ROUND_METRICS) < set(events[1])
    assert events[0]["config"]["target"]["hf_token"] == "[redacted]"
    assert "the private answer" not in json.dumps(events)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_takes_a_whole_run(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    whole_run(build_tracker(kind), tmp_path)


# --- what a tracker must not do to a run --------------------------------------------------------------------------


class Faulty(NullTracker):
    """Calls `fault` in one of its methods."""

    def __init__(self, method: str, fault: Callable[[], None]) -> None:
        self.calls = 0

        def broken(*args: object, **kwargs: object) -> None:
            self.calls += 1
            fault()

        setattr(self, method, broken)


METHODS = ("start", "log_round", "log_prompt", "log", "summary", "finish")


def fail() -> None:
    raise ConnectionError("server gone,\nkey hf_ABCDEFGHIJKLMNOPQRST")


@pytest.mark.parametrize("method", METHODS)
def test_an_exception_costs_one_warning_and_then_silence(method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    inner = Faulty(method, fail)
    whole_run(GuardedTracker(inner, name="W&B"), tmp_path)
    assert inner.calls == 1
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert "ConnectionError: server gone" in warning.getMessage()
    assert "hf_ABC" not in warning.getMessage() and "\n" not in warning.getMessage()


@pytest.mark.parametrize("method", METHODS)
def test_a_hang_costs_its_patience_once(method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    release = threading.Event()
    guarded = GuardedTracker(
        Faulty(method, lambda: release.wait(60) and None),
        name="W&B",
        patience_s=0.2,
        start_patience_s=0.2,
        finish_patience_s=0.2,
    )
    started = time.perf_counter()
    whole_run(guarded, tmp_path)
    took_s = time.perf_counter() - started
    release.set()
    assert 0.15 < took_s < 1.0
    assert len(caplog.records) == 1 and "did not answer within 0.2 s" in caplog.text


def test_rounds_are_only_queued_and_the_tracker_rests_while_clocks_run(tmp_path: Path):
    seen: list[float] = []

    class Slow(NullTracker):
        def log_round(self, record: RoundRecord, *, method: str, prompt_id: str, repeat: int) -> None:
            time.sleep(0.01)
            seen.append(time.perf_counter())

    guarded = GuardedTracker(Slow(), name="slow")
    guarded.start({}, run_name="r", group="g", job_type="j", run_dir=tmp_path, config_hash=HASH)
    started = time.perf_counter()
    record = result(num_rounds=20)
    for one in record.rounds:
        guarded.log_round(one, method="ar", prompt_id="p", repeat=0)
    assert time.perf_counter() - started < 0.1  # 20 calls that take 0.2 s in the tracker
    guarded.log_prompt(record)
    next_clock_starts = time.perf_counter()
    assert len(seen) == 20 and max(seen) <= next_clock_starts
    guarded.finish()


def test_an_unstarted_or_finished_tracker_takes_calls_without_effect(tmp_path: Path):
    guarded = GuardedTracker(WandbTracker(offline=True), name="W&B")
    log_result(guarded, result())
    guarded.finish()
    whole_run(guarded, tmp_path)
    log_result(guarded, result())
    guarded.finish()


# --- configuration ------------------------------------------------------------------------------------------------


def test_configs_are_checked():
    assert isinstance(tracker_from_config({}), NullTracker)
    assert isinstance(tracker_from_config({"kind": "none"}), NullTracker)
    for config, message in [
        ({"kind": "tensorboard"}, "Allowed: none, jsonl, wandb, wandb_offline"),
        ({"kind": "wandb", "api_key": "x"}, "tracking.api_key is unknown"),
        ({"kind": "wandb", "tags": "paper"}, "not a list"),
    ]:
        with pytest.raises(UserError, match=message):
            tracker_from_config(config)


def test_every_tracking_config_builds():
    from omegaconf import OmegaConf

    from selfspec.config import conf_names, load_conf

    assert set(conf_names("tracking")) == set(KINDS)
    for name in KINDS:
        config = OmegaConf.to_container(load_conf("tracking", name))
        assert config["kind"] == name
        tracker_from_config(config)


def test_prompt_metrics_leave_out_what_was_not_measured():
    record = result(num_rounds=0)
    record.alpha_sum = record.equals_ar = None
    record.total_s = 0.0
    assert {"acceptance_length", "alpha", "equals_ar", "tokens_per_s"}.isdisjoint(prompt_metrics(record))


def test_flatten_joins_names_and_drops_nothing_but_none():
    assert flatten({"a": {"b": [1, {"c": 2}], "d": None}, "e": "x"}) == {"a/b/0": 1, "a/b/1/c": 2, "e": "x"}


def test_a_measured_run_is_mirrored_round_by_round(tmp_path: Path):
    """The main job with `tracking=wandb_offline`: what W&B shows is what the run directory holds."""
    root = Path(__file__).parent.parent.parent
    overrides = ["experiment=smoke_tiny", "tracking=wandb_offline", "measure.max_prompts=2", f"output_dir={tmp_path}"]
    command = [sys.executable, str(root / "experiments" / "compare.py"), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    (run_dir,) = tmp_path.glob("smoke/tiny-*")
    mirrored = read_offline_run(run_dir)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert mirrored.config["config_hash"].startswith(run_dir.name.rpartition("-")[2])
    assert mirrored.exit_code == 0
    for line in (run_dir / "rounds.jsonl").read_text().splitlines():
        entry = json.loads(line)
        rows = [row for row in mirrored.rows(f"{entry['method']}/round/") if row["prompt_id"] == entry["prompt_id"]]
        found = [[row[name] for name in ROUND_METRICS] for row in rows]
        assert len(found) == len(entry["rounds"])
        assert found == [pytest.approx(one) for one in entry["rounds"]]
    for name in summary["methods"]:
        assert len(mirrored.rows(f"{name}/prompt/")) == 2
        assert any(key.startswith(f"methods/{name}/") for key in mirrored.summary)
