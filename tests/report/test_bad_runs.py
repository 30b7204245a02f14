"""Run directories as they arrive from elsewhere: half copied, of another version, not there. One sentence, no file."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from made_runs import made_records, write_run

from selfspec.errors import UserError
from selfspec.report.build import build_report


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def of_version_2(path: Path) -> None:
    path.write_text(re.sub(r'"schema_version": ?1', '"schema_version": 2', path.read_text(), count=1))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("whole") / "whole-0123abcd", made_records(2, 1))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("DONE", Path.unlink, "is not a finished run (no DONE file); resume it, or pass allow_unfinished=true"),
        ("config.yaml", Path.unlink, "lacks config.yaml; the run directory is incomplete. Measure the run again"),
        ("provenance.json", Path.unlink, "lacks provenance.json"),
        ("summary.json", Path.unlink, "lacks summary.json"),
        ("rounds.jsonl", Path.unlink, "rounds.jsonl has no line for prompt 'p00'"),
        ("prompts.jsonl", Path.unlink, "DONE counts 10 results but prompts.jsonl holds 0"),
        ("prompts.jsonl", cut, "DONE counts 10 results but prompts.jsonl holds"),
        ("rounds.jsonl", cut, "rounds.jsonl has no line for"),
        ("DONE", cut, "is damaged"),
        ("summary.json", empty, "is damaged"),
        ("provenance.json", cut, "is damaged"),
        ("config.yaml", cut, "config.yaml is damaged"),
        ("config.yaml", empty, "config.yaml should hold a mapping, found NoneType; restore the file or measure"),
        ("prompts.jsonl", of_version_2, "prompts.jsonl:1 has schema version 2, this selfspec reads version 1; use the"),
        ("summary.json", of_version_2, "summary.json has schema version 2"),
        ("DONE", of_version_2, "DONE has schema version 2"),
    ],
)
def test_a_damaged_run_is_named_even_beside_a_good_one(
    whole: Path, tmp_path: Path, name: str, damage: Callable[[Path], None], message: str
):
    damaged = tmp_path / "damaged-4567cdef"
    shutil.copytree(whole, damaged)
    damage(damaged / name)
    with pytest.raises(UserError, match=re.escape(message)) as error:
        build_report([whole, damaged], "all", tmp_path / "out", allow_mixed=True)
    assert "damaged-4567cdef" in str(error.value) and "whole" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("runs", [None, 5, [None], {"a": "b"}])
def test_what_is_no_name_of_a_folder_is_said_to_be_none(runs: object, tmp_path: Path):
    with pytest.raises(UserError, match="names no folder; pass outputs/"):
        build_report(runs, "csv", tmp_path)  # type: ignore[arg-type]
