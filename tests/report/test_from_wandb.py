"""Tables built from W&B are those built from the run directories; what can go wrong on the way is said in one sentence.

The server is `wandb_server.py`'s, which answers over HTTP; client, downloads and checksums are wandb's own.
"""

from __future__ import annotations

import importlib.util
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import wandb
from made_runs import made_records, write_run
from wandb_server import Project, wandb_server

from selfspec.errors import UserError
from selfspec.mirror import RECORD_FILES
from selfspec.report.build import build_report
from selfspec.tracking.wandb_fetch import Address, fetch_runs, parse_address

ROOT = Path(__file__).parents[2]
FORMATS = ["markdown", "latex", "csv"]
KEY = "local-" + "0" * 40


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs of two studies, one of them on tuning prompts, as compare.py leaves them."""
    folder = tmp_path_factory.mktemp("outputs")
    for number, name in enumerate(("b/quick-0123abcd", "b/again-4567cdef", "a/tune-89abcdef")):
        split = "tune" if name.startswith("a") else "report"
        prompt_set: dict[str, tuple[str, str | None]] = {f"p{index:02d}": (split, None) for index in range(3)}
        write_run(folder / name, made_records(3, 1, seed=number), prompt_set=prompt_set)
    return folder


@pytest.fixture(scope="module")
def project(outputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A server with what a tracker is given to keep, and a login there. wandb reads its variables when it starts."""
    home = tmp_path_factory.mktemp("home")
    with wandb_server() as project, pytest.MonkeyPatch.context() as patch:
        for run in sorted(done.parent for done in outputs.rglob("DONE")):
            kept = [run / name for name in RECORD_FILES if (run / name).exists()]
            project.log(f"records-{run.name}", kept, study=run.parent.name)
        project.log("figures-quick-0123abcd", [])
        places = {"HOME": str(home), "NETRC": str(home / "netrc"), "WANDB_CACHE_DIR": str(home / "cache")}
        login = {"WANDB_BASE_URL": project.url, "WANDB_API_KEY": KEY, "WANDB_MODE": "online"}
        for name, value in {**places, **login}.items():
            patch.setenv(name, value)
        wandb.teardown()
        yield project
    wandb.teardown()


@pytest.fixture
def fresh_wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """For tests that set wandb's variables: it starts anew before and after."""
    wandb.teardown()
    yield monkeypatch
    wandb.teardown()


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def at_hand(runs: str | list[str], cache: Path) -> list[str | Path]:
    """experiments/report.py's way from `runs=` to folders."""
    spec = importlib.util.spec_from_file_location("report_entry", ROOT / "experiments" / "report.py")
    assert spec is not None and spec.loader is not None
    entry = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(entry)
    folders: list[str | Path] = entry.at_hand(runs, cache)
    return folders


def test_tables_from_wandb_are_byte_for_byte_those_from_the_directories(project, outputs, tmp_path):
    build_report(outputs / "b", FORMATS, tmp_path / "local")
    build_report(at_hand("wandb://lab/papers/b", tmp_path / "cache"), FORMATS, tmp_path / "online")
    assert files_in(tmp_path / "online") == files_in(tmp_path / "local")
    assert len(files_in(tmp_path / "local")) >= 5
    (quick,) = (tmp_path / "cache").rglob("quick-0123abcd")
    assert files_in(quick) == files_in(outputs / "b" / "quick-0123abcd"), "also the prompts' split and references"


def test_a_run_is_downloaded_once_and_chosen_by_study_name_pattern_or_version(project, outputs, tmp_path):
    everything = fetch_runs("wandb://lab/papers", tmp_path)
    assert [path.name for path in everything] == ["tune-89abcdef", "again-4567cdef", "quick-0123abcd"]
    before = len(project.asked)
    for pattern in ("b/", "*[kn]-????cde*", "quick-0123abcd:v0"):
        assert set(fetch_runs(f"wandb://lab/papers/{pattern}", tmp_path)) < set(everything)
    assert fetch_runs("wandb://lab/papers/quick-*", tmp_path) == everything[2:]
    assert "FetchArtifactManifest" not in project.asked[before:]
    with pytest.raises(UserError, match="tune-89abcdef was measured on prompts for choosing settings"):
        build_report(everything, "csv", tmp_path / "out")


def test_runs_measured_again_elsewhere_are_versions_and_stay_apart(project, outputs, tmp_path):
    other = write_run(tmp_path / "elsewhere" / "quick-0123abcd", made_records(3, 1, seed=7))
    project.log("records-quick-0123abcd", [other / name for name in RECORD_FILES if (other / name).exists()], "v1")
    try:
        (newest,) = fetch_runs("wandb://lab/papers/quick-0123abcd", tmp_path)
        (oldest,) = fetch_runs("wandb://lab/papers/quick-0123abcd:v0", tmp_path)
    finally:
        del project.artifacts["records-quick-0123abcd", "v1"]
    assert files_in(newest) == files_in(other)
    assert files_in(oldest) == files_in(outputs / "b" / "quick-0123abcd")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("wandb://lab", "is no address of runs in W&B. Give wandb://<entity>/<project>"),
        ("wandb://lab/papers/b/c", "is no address of runs"),
        ("wandb://lab/other", "has no project lab/other, or this login may not see it"),
        ("wandb://lab/papers/z*", r"like 'z\*'. Studies: a, b. Runs: again-4567cdef, quick-0123abcd, tune-89abcdef"),
        ("wandb://lab/papers/quick-*:v9", "v9' not found"),
    ],
)
def test_an_address_without_runs_says_what_is_there(project, tmp_path, address: str, message: str):
    with pytest.raises(UserError, match=message):
        fetch_runs(address, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_project_without_records_says_how_to_upload_them(project, tmp_path, monkeypatch):
    monkeypatch.setattr(project, "artifacts", {("figures-x", "v0"): ({}, [])})
    with pytest.raises(UserError, match="holds no records of runs. Upload finished ones with `python experiments/mirr"):
        fetch_runs("wandb://lab/papers", tmp_path)


def test_a_file_changed_on_the_way_leaves_no_run_behind(project, tmp_path, monkeypatch, fresh_wandb):
    fresh_wandb.setenv("WANDB_CACHE_DIR", str(tmp_path / "wandb-cache"))
    place = "/files/records-quick-0123abcd/v0/prompts.jsonl"
    monkeypatch.setitem(project.contents, place, project.contents[place].replace(b"made", b"fake"))
    with pytest.raises(UserError, match="could not be fetched from W&B: .*prompts.jsonl"):
        fetch_runs("wandb://lab/papers/quick-*", tmp_path)
    assert not list(tmp_path.rglob("quick-*")) and not list(tmp_path.rglob(".partial-*"))


def test_an_artifact_with_folders_in_it_is_no_run(project, outputs, tmp_path, monkeypatch):
    place = "/manifests/records-quick-0123abcd/v0"
    monkeypatch.setitem(project.contents, place, project.contents[place].replace(b'"DONE"', b'"../DONE"'))
    with pytest.raises(UserError, match=r"is no run directory: it has '\.\./DONE'"):
        fetch_runs("wandb://lab/papers/quick-*", tmp_path)
    assert not list(tmp_path.rglob("DONE"))


def test_a_login_that_the_server_refuses_or_that_is_none(project, tmp_path, monkeypatch, fresh_wandb):
    monkeypatch.setattr(project, "status", 401)
    with pytest.raises(UserError, match="did not accept the login: .*not today. Run `wandb login`"):
        fetch_runs("wandb://lab/papers", tmp_path)
    wandb.teardown()
    fresh_wandb.setenv("WANDB_API_KEY", "short")
    with pytest.raises(UserError, match="did not accept the login: .*40"):
        fetch_runs("wandb://lab/papers", tmp_path)
    wandb.teardown()
    fresh_wandb.delenv("WANDB_API_KEY")
    with pytest.raises(UserError, match="no W&B login found.* Run `wandb login` or set WANDB_API_KEY"):
        fetch_runs("wandb://lab/papers", tmp_path)


@pytest.mark.parametrize("mute", [False, True])
def test_a_server_that_cannot_be_reached_is_said_within_seconds(mute: bool, tmp_path, fresh_wandb):
    """Nothing listens, or it accepts and never answers; wandb's own client would try for a minute or more."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(5)
        port = silent.getsockname()[1] if mute else 9
        for name, value in {"WANDB_BASE_URL": f"http://127.0.0.1:{port}", "WANDB_API_KEY": KEY}.items():
            fresh_wandb.setenv(name, value)
        started = time.monotonic()
        with pytest.raises(UserError, match=f"server http://127.0.0.1:{port} does not answer.* give runs=outputs"):
            fetch_runs("wandb://lab/papers", tmp_path)
        assert time.monotonic() - started < 60


def test_addresses_are_read():
    assert parse_address("wandb://lab/papers") == parse_address("wandb://lab/papers/") == Address("lab", "papers")
    assert parse_address("wandb://a-b/c.d/quick-*:v3") == Address("a-b", "c.d", "quick-*", "v3")
    for text in ("wandb://", "wandb:///papers", "wandb://lab/papers/x:", "wandb://lab/papers/../x"):
        with pytest.raises(UserError, match="is no address"):
            parse_address(text)
