"""Hub sets, read from local folders in the hub's formats: columns, templates, pinned contents, and clear refusals."""

from __future__ import annotations

import json
import sys

import pytest

from selfspec.config import conf_names, load_conf
from selfspec.errors import UserError
from selfspec.prompts import prompts_from_config, prompts_hash
from selfspec.prompts_hub import COMMIT, HubSet, hub_lines

pytest.importorskip("datasets")
ROWS = [
    {"task": "t/1", "question": "2 + 2?", "answer": "It is #### 4", "kind": "sum"},
    {"task": "t/2", "question": "3 + 5?", "answer": "It is #### 8", "kind": "sum"},
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(tmp_path / "tiny")


def test_columns_and_templates_become_prompts(folder):
    config = {"hub": folder, "turns": "Solve: {question}", "id": "task", "category": "kind", "reference": "answer"}
    first, second = prompts_from_config(config)
    assert (first.prompt_id, first.category, first.turns) == ("tiny-t/1", "sum", ("Solve: 2 + 2?",))
    assert second.reference == "It is #### 8"


def test_other_contents_than_pinned_are_refused(folder):
    config = {"hub": folder, "turns": "question"}
    pinned = prompts_hash(prompts_from_config(config))
    assert len(prompts_from_config(config | {"content_sha256": pinned})) == 2
    with pytest.raises(UserError, match=f"{pinned}.*revision that was used before"):
        prompts_from_config(config | {"content_sha256": "0" * 64})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"turns": "text"}, "no column 'text'. It has: task, question, answer, kind"),
        ({"turns": "{question} {hint}"}, "no column 'hint'"),
        ({"hub": "owner/name"}, "not a full commit id"),
        ({"hub": "owner/name", "revision": "main"}, "a branch or a tag may change"),
        ({"hub_split": "train"}, "cannot read .*A local copy serves as well"),
        ({"limt": 3}, "prompts.limt is unknown. Allowed with hub: hub, revision"),
        ({"id": 3}, "prompts.id=3 is not a text"),
    ],
)
def test_mistakes_say_what_there_is(folder, changes, message):
    with pytest.raises(UserError, match=message):
        prompts_from_config({"hub": folder, "turns": "question"} | changes)


def test_a_hub_out_of_reach_is_one_clear_error(folder):
    with pytest.raises(UserError, match="cannot read owner/name"):
        prompts_from_config({"hub": "owner/name", "revision": "0" * 40, "turns": "question"})


def test_without_the_library_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'selfspec\[data\]'"):
        hub_lines(HubSet("owner/name", revision="0" * 40))


def test_every_hub_set_of_conf_is_pinned_to_a_commit():
    hub_sets = [conf for name in conf_names("prompts") if "hub" in (conf := load_conf("prompts", name))]
    assert len(hub_sets) >= 4
    assert all(COMMIT.fullmatch(conf.revision) for conf in hub_sets)
