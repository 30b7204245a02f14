"""Trackers see every round and result, hold no secret, and can neither stop nor slow a run."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from wandb_log import OfflineRun, read_offline_run, read_offline_runs

from selfspec.errors import UserError
from selfspec.records import PromptRecord, RoundRecord, RunWriter
from selfspec.tracking import KINDS, Tracker, build_tracker, guard, log_result, tracker_from_config
from selfspec.tracking.base import ARTIFACTS, ROUND_METRICS, flatten, prompt_metrics
from selfspec.tracking.guard import GuardedTracker
from selfspec.tracking.null import NullTracker
from selfspec.tracking.views import MethodView, method_views, role_of, round_histograms
from selfspec.tracking.wandb import WandbTracker, run_id

CONFIG = {
    "target": {"kind": "random", "hf_token": "s3cret"},
    "drafters": {"early_exit": {"kind": "early_exit", "exit_layer": 2}, "small": {"kind": "independent"}},
    "max_new_tokens": 16,
    "seeds": [1, 2],
}
SUMMARY = {
    "methods": {
        "ar": {"al_pooled": 1.0, "joint_acceptance": []},
        "early_exit": {"al_pooled": 2.5, "joint_acceptance": [0.8, 0.7], "conditional_acceptance": [0.8, 0.875]},
    },
    "categories": {"math": {"ar": {"al_pooled": 1.0}, "early_exit": {"al_pooled": 2.5, "num_prompts": 2}}},
}
HISTOGRAMS = {"num_drafted", "num_accepted", "num_emitted", "draft_s", "verify_s", "other_s"}
HASH = "0123456789abcdef"


@pytest.fixture(autouse=True, scope="module")
def patience() -> Iterator[None]:
    """On a machine with more to do than cores, wandb may be slow without being broken; no test waits for these."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PATIENCE_S", "START_PATIENCE_S", "FINISH_PATIENCE_S"):
            patch.setattr(guard, name, 150.0)
        yield


@pytest.fixture(scope="module")
def mirrored(patience: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[OfflineRun]]:
    """A whole run, kept offline and read back: its directory, the run itself, and the runs of its methods."""
    folder = tmp_path_factory.mktemp("mirrored") / "quick-01234567"
    whole_run(build_tracker("wandb_offline", project="papers", tags=["a", "b"]), folder, exit_code=1, store=True)
    return folder, sorted(read_offline_runs(folder), key=lambda run: run.config.get("method", ""))


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


def whole_run(tracker: Tracker, run_dir: Path, exit_code: int = 0, store: bool = False) -> None:
    """What a run tells its tracker; with `store` the results lie in `run_dir`, too, as those of a real run do."""
    tracker.start(CONFIG, run_name="quick", group="smollm2", job_type="compare", run_dir=run_dir, config_hash=HASH)
    for prompt_id in ("math-01", "math-02"):
        for record in (result("ar", prompt_id, num_rounds=2), result("early_exit", prompt_id, num_rounds=3)):
            if store:
                with RunWriter(run_dir) as writer:
                    writer.append(record)
            log_result(tracker, record)
    tracker.log({"loss": 2.5, "lr": 0.1}, step=10)
    tracker.summary(SUMMARY)
    tracker.keep("records", "quick", [Path(__file__)])
    tracker.finish(exit_code)


def in_a_process_of_its_own(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """wandb reads its variables once per process, so a test of them needs a fresh one. `folder` is what the code calls
    it; the result's patience is that of this file.
    """
    begin = "import sys, pathlib\nfrom test_tracking import *\nfolder = pathlib.Path(sys.argv[1])\n"
    begin += "guard.PATIENCE_S = guard.START_PATIENCE_S = guard.FINISH_PATIENCE_S = 150\n"
    env = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(map(str, Path(__file__).parents[:2]))}
    command = [sys.executable, "-c", begin + code, str(folder)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=400, check=True)


def test_an_offline_wandb_run_read_back_holds_config_rounds_prompts_and_summary(mirrored):
    folder, (run, *_) = mirrored

    assert run.config["max_new_tokens"] == 16
    assert run.config["target"] == {"kind": "random", "hf_token": "[redacted]"}
    assert run.config["config_hash"] == HASH
    names = {"project": "papers", "run_group": "smollm2", "job_type": "compare", "display_name": "quick"}
    assert names.items() <= run.names.items()
    assert run.names["tags"] == ["a", "b"]
    assert run.names["run_id"] == run_id(HASH, folder)

    rounds = run.rows("early_exit/round/")
    assert [row["index"] for row in rounds] == list(range(6))
    assert [row["prompt_id"] for row in rounds] == ["math-01"] * 3 + ["math-02"] * 3
    expected = {"num_drafted": 4, "num_accepted": 2, "num_emitted": 3, "draft_s": 0.1, "verify_s": 0.2, "other_s": 0.01}
    assert {name: rounds[0][name] for name in expected} == pytest.approx(expected)
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
    assert run.summary["methods/early_exit/joint_acceptance/1"] == 0.7
    assert not any("/round/" in key for key in run.summary), "the last round is not a summary"
    assert run.exit_code == 1, "a failed run says so"


def test_every_result_has_a_histogram_over_its_rounds_and_the_summary_has_tables(mirrored):
    folder, (run, *_) = mirrored
    histograms = run.rows("early_exit/rounds/num_accepted.")
    assert [row["values"] for row in histograms] == [[0, 0, 3], [0, 0, 3]]  # three rounds, two accepted in each
    assert histograms[0]["bins"] == [-0.5, 0.5, 1.5, 2.5]
    assert {"methods", "categories", "positions"} <= {key.split(".")[0] for key in run.keys}
    (path,) = folder.glob("wandb/offline-run-*/files/media/table/categories_*.table.json")
    table = json.loads(path.read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [(row["category"], row["method"], row["al_pooled"]) for row in rows] == [
        ("math", "ar", 1.0),
        ("math", "early_exit", 2.5),
    ]
    (path,) = folder.glob("wandb/offline-run-*/files/media/table/positions_*.table.json")
    assert json.loads(path.read_text())["data"] == [["early_exit", 1, 0.8, 0.8], ["early_exit", 2, 0.7, 0.875]]


def test_one_group_lays_the_methods_over_each_other(mirrored):
    """The keys of a method's run do not name the method: that is what makes a chart of the group a comparison."""
    _, (main, *methods) = mirrored
    by_method = {run.config["method"]: run for run in methods}
    assert set(by_method) == {"ar", "early_exit"}
    assert {run.names["run_group"] for run in methods} == {"quick-01234567"} == {main.config["methods_group"]}
    assert by_method["ar"].names["job_type"] == "baseline"
    assert by_method["early_exit"].names["job_type"] == "self_draft"
    assert by_method["early_exit"].config["drafter"] == {"kind": "early_exit", "exit_layer": 2}
    assert len({run.names["run_id"] for run in (main, *methods)}) == 3
    wanted = {"prompt/tokens_per_s", "prompt/index", "round/num_accepted.values", "al_pooled"}
    for run in methods:
        assert wanted <= run.keys
        assert [row["index"] for row in run.rows("prompt/") if "index" in row] == [0, 1]
        assert run.exit_code == 0
    assert by_method["early_exit"].summary["al_pooled"] == 2.5


def test_the_keys_of_the_log_are_these(mirrored):
    """What charts and sweeps are built on: a key that is renamed breaks them."""
    _, (main, ar, _) = mirrored
    rounds = {f"ar/round/{name}" for name in (*ROUND_METRICS, "index", "prompt_id", "repeat")}
    histograms = {f"ar/rounds/{name}" for name in HISTOGRAMS}
    of_results = {*prompt_metrics(result()), "index", "prompt_id", "category", "repeat"}
    found = {key.split(".")[0] for key in main.keys}
    assert {key for key in found if key.startswith("ar/")} == {
        *rounds, *histograms, *(f"ar/prompt/{name}" for name in of_results),
    }  # fmt: skip
    assert {key.split("/")[0] for key in found} == {
        "ar", "early_exit", "methods", "categories", "positions", "loss", "lr", "step",
    }  # fmt: skip
    assert {key.split(".")[0] for key in ar.keys} == {
        *(f"prompt/{name}" for name in of_results), *(f"round/{name}" for name in HISTOGRAMS), "al_pooled",
    }  # fmt: skip


def test_under_a_sweep_agent_there_is_one_run_and_it_is_the_trial(tmp_path: Path):
    folder = tmp_path / "quick-01234567"
    code = "whole_run(build_tracker('wandb_offline'), folder, store=True)\nimport wandb\nwandb.teardown()"
    in_a_process_of_its_own(code, folder, WANDB_SWEEP_ID="sweep123", WANDB_RUN_ID="trial7")
    (run,) = read_offline_runs(folder)
    assert run.names["run_id"] == "trial7"
    assert run.summary["methods/early_exit/al_pooled"] == 2.5


def test_files_become_artifacts_of_their_kind_and_only_those_that_are_wanted(tmp_path: Path):
    draft = tmp_path / "draft"
    (draft / "weights").mkdir(parents=True)
    (draft / "config.json").write_text("{}")
    (draft / "weights" / "model.safetensors").write_bytes(b"x")
    for own in ("wandb/offline-run-1/run-1.wandb", ".draft.partial/config.json"):  # how it came about, not what it is
        (draft / own).parent.mkdir(parents=True)
        (draft / own).write_text("x")
    for name, wanted in {"all": ARTIFACTS, "none": ()}.items():
        tracker = build_tracker("wandb_offline", artifacts=wanted)
        tracker.start({}, run_name="r", group="g", job_type="j", run_dir=tmp_path / name, config_hash=HASH)
        tracker.keep("drafts", "small & 50%", [draft])
        tracker.finish()
    assert read_offline_run(tmp_path / "none").artifacts == {}
    artifacts = read_offline_run(tmp_path / "all").artifacts
    assert artifacts == {"drafts/drafts-small___50_": {"draft/config.json", "draft/weights/model.safetensors"}}


def test_a_resumed_run_has_the_same_id_and_goes_on_behind_its_rows(tmp_path: Path):
    """Offline, each start is a log of its own; `wandb sync` joins logs of one id, so indices must not start again."""
    folder = tmp_path / "quick-01234567"
    runs = []
    for prompt_id in ("math-01", "math-02"):
        tracker = build_tracker("wandb_offline")
        tracker.start(CONFIG, run_name="r", group="g", job_type="j", run_dir=folder, config_hash=HASH)
        record = result("early_exit", prompt_id)
        with RunWriter(folder) as writer:
            writer.append(record)
        log_result(tracker, record)
        tracker.finish()
        runs = read_offline_runs(folder)
    assert len(runs) == 2 and len({run.names["run_id"] for run in runs}) == 1
    assert [row["index"] for run in runs for row in run.rows("early_exit/prompt/")] == [0, 1]
    assert [row["index"] for run in runs for row in run.rows("early_exit/round/")] == list(range(6))


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
    assert run.names["host"] not in ("", socket.gethostname())
    assert run.kinds.isdisjoint({"output", "output_raw", "stats", "environment"})
    captured = capsys.readouterr()
    assert captured.out == ""


def test_wandb_itself_would_upload_the_offline_run(mirrored):
    folder, runs = mirrored
    folders = sorted(map(str, folder.glob("wandb/offline-run-*")))
    command = [sys.executable, "-m", "wandb", "sync", "--dry-run", *folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert all(run.names["run_id"] in done.stdout + done.stderr for run in runs)


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


UNREACHABLE = {
    "nothing listens": "http://127.0.0.1:9",
    "it accepts and never answers": None,
}


@pytest.mark.parametrize("kind", UNREACHABLE)
def test_an_unreachable_server_costs_seconds_and_the_run_is_kept_offline(kind: str, tmp_path: Path):
    """Nothing is mocked but the server's address."""
    folder = tmp_path / "quick-01234567"
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen(50)
        address = UNREACHABLE[kind] or f"http://127.0.0.1:{mute.getsockname()[1]}"
        environment = {"WANDB_MODE": "online", "WANDB_BASE_URL": address, "WANDB_API_KEY": "local-" + "0" * 40}
        done = in_a_process_of_its_own("whole_run(build_tracker('wandb'), folder, store=True)", folder, **environment)
    assert done.stderr.count("does not answer") == 1, done.stderr
    assert "stopped" not in done.stderr, done.stderr
    runs = read_offline_runs(folder)
    assert len(runs) == 3 and {run.exit_code for run in runs} == {0}


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
def test_a_full_disk_under_wandb_does_not_stop_the_run(tmp_path: Path):
    """A real disk of 64 KiB, where wandb writes its log; the run directory itself has room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount a tmpfs here")
    try:
        folder = tmp_path / "quick-01234567"
        folder.mkdir()
        (folder / "wandb").symlink_to(disk)
        code = "tracker = build_tracker('wandb_offline')\n"
        code += "names = {'run_name': 'r', 'group': 'g', 'job_type': 'j', 'run_dir': folder, 'config_hash': HASH}\n"
        code += "tracker.start(CONFIG, **names)\n"
        code += "for _ in range(200): log_result(tracker, result(num_rounds=20))\n"
        code += "tracker.summary(SUMMARY)\ntracker.finish()\nprint('the run is done')"
        done = in_a_process_of_its_own(code, folder)
        free = os.statvfs(disk).f_bavail
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
    assert "the run is done" in done.stdout, done.stderr
    assert free == 0, "the disk was not full: this test showed nothing"


def test_jsonl_has_one_line_per_event_and_a_resumed_run_appends(tmp_path: Path):
    for _ in range(2):
        whole_run(build_tracker("jsonl"), tmp_path)
    events = [json.loads(line) for line in (tmp_path / "tracking.jsonl").read_text().splitlines()]
    names = [event["event"] for event in events]
    once = ["start", *(["round"] * 2 + ["prompt"] + ["round"] * 3 + ["prompt"]) * 2, "log", "summary", "keep", "finish"]
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


METHODS = ("start", "log_round", "log_prompt", "log", "summary", "keep", "finish")


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
        ({"kind": "wandb", "artifacts": ["weights"]}, "Give a list of records, drafts, figures"),
        ({"kind": "wandb", "artifacts": "records"}, "Give a list of records, drafts, figures"),
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


def test_roles_tell_self_drafts_from_an_independent_one():
    drafters = {"small": {"kind": "independent"}, "exit": {"kind": "early_exit"}, "lookup": {"kind": "ngram"}}
    roles = {name: role_of(name, drafters) for name in ("ar", "hf_generate", *drafters)}
    assert roles == {
        "ar": "baseline",
        "hf_generate": "baseline",
        "small": "independent_draft",
        "exit": "self_draft",
        "lookup": "lookup",
    }


def test_method_views_order_results_alike_whatever_the_order_of_measurement():
    records = [result(method, prompt) for prompt, method in (("b", "ar"), ("b", "x"), ("a", "x"), ("a", "ar"))]
    views: list[MethodView] = method_views({"methods": {"ar": {}, "x": {}}}, records, {})
    order = [[(row["prompt/index"], row["prompt/prompt_id"]) for row in view.results] for view in views]
    assert order == [[(0, "b"), (1, "a")]] * 2


def test_round_histograms_count_every_round_and_are_empty_without_rounds():
    histograms = round_histograms([result(num_rounds=3), result(num_rounds=2)])
    assert set(histograms) == HISTOGRAMS
    assert all(sum(counts) == 5 for counts, _ in histograms.values())
    assert round_histograms([result(num_rounds=0)]) == {}


def test_flatten_joins_names_and_drops_nothing_but_none():
    assert flatten({"a": {"b": [1, {"c": 2}], "d": None}, "e": "x"}) == {"a/b/0": 1, "a/b/1/c": 2, "e": "x"}


@pytest.mark.slow
def test_a_measured_run_is_mirrored_round_by_round_with_its_files(tmp_path: Path):
    """The main job with `tracking=wandb_offline`: what W&B shows is what the run directory holds."""
    code = "from hydra import compose, initialize_config_dir\nfrom selfspec.config import conf_dir\n"
    code += "from selfspec.run import run_compare\nimport wandb\n"
    code += (
        "overrides = ['experiment=smoke_tiny', 'tracking=wandb_offline', 'measure.max_prompts=2', 'measure.trace=0']\n"
    )
    code += "with initialize_config_dir(str(conf_dir()), version_base='1.3'):\n"
    code += "    overrides += ['measure.trace=0', 'max_new_tokens=4', f'output_dir={folder}']\n"
    code += "    composed = compose('compare', overrides)\n"
    code += "run_compare(composed)\nwandb.teardown()\n"
    in_a_process_of_its_own(code, tmp_path, OMP_NUM_THREADS="1")
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
    artifacts = {name: files for name, files in mirrored.artifacts.items() if not name.startswith("run_table/")}
    assert set(artifacts) == {f"records/records-{run_dir.name}", f"figures/figures-{run_dir.name}"}
    assert {"prompts.jsonl", "rounds.jsonl", "DONE"} <= artifacts[f"records/records-{run_dir.name}"]
    assert {"speedup.pdf", "speedup.png"} <= artifacts[f"figures/figures-{run_dir.name}"]
    groups = {run.config.get("method"): run.names["run_group"] for run in read_offline_runs(run_dir)}
    assert groups == {None: "smoke", **dict.fromkeys(summary["methods"], run_dir.name)}
