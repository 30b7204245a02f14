"""Provenance: complete enough to repeat a run, and nothing in it that should not be published."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from selfspec import provenance
from selfspec.provenance import REDACTED, is_secret_name, redact, redact_argv, redact_text


def test_collect_is_json_and_says_what_a_repetition_needs():
    collected = provenance.collect(seeds={"run": 3}, fingerprints={"target": "f00d"}, argv=["compare.py", "seed=3"])
    assert json.loads(json.dumps(collected)) == collected
    assert collected["packages"]["torch"] and collected["packages"]["transformers"]
    assert collected["cpu"]["num_available_cores"] >= 1
    assert collected["memory_bytes"] > 2**28
    assert collected["torch"]["num_threads"] == 1
    assert collected["time_utc"].endswith("+00:00")
    assert (collected["seeds"], collected["fingerprints"], collected["argv"]) == (
        {"run": 3},
        {"target": "f00d"},
        ["compare.py", "seed=3"],
    )


def test_importing_provenance_does_not_import_torch():
    code = "import sys, selfspec.provenance; sys.exit('torch' in sys.modules)"
    lazy_package = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    ).returncode
    assert lazy_package == 0


def test_neither_environment_nor_host_name_is_recorded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_SERVICE_PASSWORD", "hunter2-in-the-environment")
    monkeypatch.setenv("INNOCENT_NAME", "innocent-value-in-the-environment")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(socket, "gethostname", lambda: "alices-laptop")
    collected = provenance.collect(argv=[])
    text = json.dumps(collected)
    assert "in-the-environment" not in text
    assert "alices-laptop" not in text
    assert collected["environment"]["OMP_NUM_THREADS"] == "1"
    monkeypatch.setattr(socket, "gethostname", lambda: "bobs-laptop")
    assert provenance.host_hash() != collected["host_hash"]


@pytest.mark.parametrize(
    "name",
    ["WANDB_API_KEY", "--hf-token", "token", "tracking.api_key", "apiKey", "userPassword", "db_password_file", "secret",
     "client_secret", "AWS_SECRET_ACCESS_KEY", "passphrase", "Authorization", "github_pat", "apikey", "+x.key"],
)  # fmt: skip
def test_secret_names_are_recognised(name: str):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["max_new_tokens", "eos_token_ids", "tokenizer", "pad_token", "eos_token", "suppress_tokens", "num_prompt_tokens",
     "key_dtype", "kv_keys", "keyboard", "tokens_per_s", "monkey", "author", "passed", "seed", "", "--", "secretary"],
)  # fmt: skip
def test_the_fields_of_a_decoder_are_not_mistaken_for_secrets(name: str):
    assert not is_secret_name(name)


def test_config_keeps_its_shape_and_loses_its_secrets():
    config = {
        "tracking": {"api_key": "abc", "project": "selfspec", "entity": None, "token": None},
        "max_new_tokens": 64,
        "targets": [{"path": "https://alice:pw@host/model", "hf_token": ["a", "b"]}],
        "note": "use Bearer abc.def and hf_ABCDEFGHIJKLMNOPQRST",
    }
    assert redact(config) == {
        "tracking": {"api_key": REDACTED, "project": "selfspec", "entity": None, "token": None},
        "max_new_tokens": 64,
        "targets": [{"path": f"https://{REDACTED}@host/model", "hf_token": REDACTED}],
        "note": f"use Bearer {REDACTED} and {REDACTED}",
    }
    assert config["tracking"]["api_key"] == "abc"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--api-key", "s3cret", "--seed", "3"], ["--api-key", REDACTED, "--seed", "3"]),
        (["--token=s3cret"], [f"--token={REDACTED}"]),
        (["+tracking.api_key=s3cret", "max_new_tokens=64"], [f"+tracking.api_key={REDACTED}", "max_new_tokens=64"]),
        (["tracking={api_key:s3cret,project:x}"], [f"tracking={{api_key:{REDACTED},project:x}}"]),
        (["tracking={'password': 's3cret'}"], [f"tracking={{'password': {REDACTED}}}"]),
        (["--token", "--verbose"], ["--token", "--verbose"]),
        (["url=https://me:s3cret@host/x"], [f"url=https://{REDACTED}@host/x"]),
        (["prompt=hf_s3cretS3CRETs3cretS3"], [f"prompt={REDACTED}"]),
        (["tracking.token="], ["tracking.token="]),
    ],
)
def test_command_lines_lose_their_secrets_only(argv: list[str], expected: list[str]):
    assert redact_argv(argv) == expected
    assert "s3cret" not in " ".join(redact_argv(argv))


def test_the_home_folder_is_not_named():
    assert redact_argv([f"target.path={Path.home()}/models/x"]) == (
        ["target.path=~/models/x"] if str(Path.home()) != "/" else ["target.path=//models/x"]
    )


def test_a_git_commit_is_not_taken_for_a_secret():
    commit = "08178710e66d1f9ce22ce92ebc186f87335a8d2e"
    assert redact_text(commit) == commit


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with one commit and a package in it."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "a.py").write_text("x = 1\n")
    (tmp_path / ".gitignore").write_text("ignored\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *command], check=True)
    return tmp_path


def test_git_state_tells_clean_from_changed_and_one_change_from_another(clone: Path):
    clean = provenance.git_state(clone / "package")
    assert clean is not None and len(clean["commit"]) == 40
    assert (clean["dirty"], clean["diff_sha256"]) == (False, None)

    (clone / "ignored").write_text("not part of the code")
    assert provenance.git_state(clone / "package") == clean

    hashes = set()
    for change in ("x = 2\n", "x = 3\n"):
        (clone / "package" / "a.py").write_text(change)
        hashes.add(provenance.git_state(clone / "package")["diff_sha256"])
    (clone / "package" / "a.py").write_text("x = 1\n")
    for change in ("y = 1\n", "y = 2\n"):
        (clone / "package" / "new.py").write_text(change)
        changed = provenance.git_state(clone / "package")
        assert changed["dirty"] and changed["commit"] == clean["commit"]
        hashes.add(changed["diff_sha256"])
    assert len(hashes) == 4 and None not in hashes


def test_an_installed_package_does_not_claim_the_repository_around_it(clone: Path):
    installed = clone / ".venv" / "lib" / "selfspec"
    installed.mkdir(parents=True)
    assert provenance.git_state(installed) is None


def test_no_git_and_no_gpu_tool_is_not_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    collected = provenance.collect(argv=[])
    assert (collected["git"], collected["gpus"]) == (None, [])


def test_gpus_are_read_from_what_nvidia_smi_prints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    tool = tmp_path / "nvidia-smi"
    line = "Some GPU, 550.54, 81559 MiB, 700.00 W, 1980 MHz, 2619 MHz, 1980 MHz, 2619 MHz, 33"
    tool.write_text(f"#!/bin/sh\necho '{line}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (gpu,) = provenance.gpus()
    assert (gpu["name"], gpu["driver_version"], gpu["clocks.sm"]) == ("Some GPU", "550.54", "1980 MHz")


def test_contents_have_changed_where_a_hash_has():
    earlier = {"git": {"commit": "a"}, "fingerprints": {"target": "1", "prompts": "2", "old name": "3"}}
    now = {"git": {"commit": "a"}, "fingerprints": {"target": "1", "prompts": "9", "new name": "3"}}
    assert provenance.changed_contents(earlier, now) == ["new name", "prompts"]
    assert provenance.changed_contents(earlier, {**now, "git": {"commit": "b"}}) == ["prompts"], "names are the code's"
    assert provenance.changed_contents(earlier, now, aside=("prompts",)) == ["new name"]
    assert provenance.changed_contents(earlier, earlier) == []
