"""Prompt sets: ours is what it claims to be, others' files are read as they are, and bad lines are named."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from selfspec.errors import UserError
from selfspec.prompts import (
    Prompt,
    bundled_sets,
    check_apart,
    load_prompts,
    prompts_from_config,
    prompts_hash,
    split_of,
    take_evenly,
)

CATEGORIES = ("chat", "code", "math", "summarise", "translate", "qa")


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_selfspec48_has_eight_distinct_prompts_in_each_of_six_categories():
    prompts = load_prompts("selfspec48")
    assert Counter(prompt.category for prompt in prompts) == dict.fromkeys(CATEGORIES, 8)
    assert len({prompt.prompt_id for prompt in prompts}) == 48
    assert len({prompt.turns for prompt in prompts}) == 48
    assert "selfspec48" in bundled_sets()


def test_selfspec48_passages_are_of_realistic_length():
    for prompt in load_prompts("selfspec48", categories=["summarise", "qa"]):
        assert 100 <= len(" ".join(prompt.turns).split()) <= 280, prompt.prompt_id


def test_selfspec48_has_not_changed():
    """Published numbers name this hash: a changed prompt makes a new set with a new name."""
    assert (
        prompts_hash(load_prompts("selfspec48")) == "d4a1eee43561fc56507499f4033e786ffeca6082a452387f7d393fc07c0e981d"
    )


@pytest.mark.parametrize("limit", [1, 5, 6, 12, 13, 47, 48, 1000])
def test_limit_takes_evenly_from_each_category_and_keeps_the_order(limit: int):
    everything = load_prompts("selfspec48")
    some = load_prompts("selfspec48", limit=limit)
    counts = Counter(prompt.category for prompt in some)
    assert len(some) == min(limit, 48)
    assert max(counts.values()) - min(counts[category] for category in CATEGORIES) <= 1
    assert some == [prompt for prompt in everything if prompt in set(some)]
    assert some == load_prompts("selfspec48", limit=limit)


def test_a_smaller_limit_is_a_subset_of_a_larger_one():
    assert set(load_prompts("selfspec48", limit=7)) < set(load_prompts("selfspec48", limit=20))


def test_uneven_categories_are_exhausted_one_after_another():
    prompts = [Prompt(f"a{i}", "a", ("x",)) for i in range(5)] + [Prompt("b0", "b", ("x",))]
    assert [prompt.prompt_id for prompt in take_evenly(prompts, 4)] == ["a0", "a1", "a2", "b0"]


def test_spec_bench_lines_keep_their_turns_and_their_first_reference(tmp_path: Path):
    path = write(
        tmp_path / "question.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["Compose.", "Rewrite."], "reference": ["x"]},
        {"question_id": 82, "category": "qa", "turns": ["Why?"]},
    )
    assert load_prompts(path) == [
        Prompt("81", "writing", ("Compose.", "Rewrite."), reference="x"),
        Prompt("82", "qa", ("Why?",)),
    ]


def test_lines_without_id_and_category_get_stable_ones(tmp_path: Path):
    path = write(tmp_path / "mine.jsonl", {"prompt": "Hello"}, "", {"prompt": "Bye"})
    first, second = load_prompts(str(path))
    assert (first.category, first.turns) == ("default", ("Hello",))
    write(path, {"prompt": "Bye"}, {"prompt": "Hello"})
    assert load_prompts(path) == [second, first]


def test_hash_depends_on_every_field_and_the_order():
    base = [Prompt("a", "c", ("x",)), Prompt("b", "c", ("y",))]
    others = [
        [Prompt("A", "c", ("x",)), base[1]],
        [Prompt("a", "C", ("x",)), base[1]],
        [Prompt("a", "c", ("x", "x")), base[1]],
        base[::-1],
        base[:1],
    ]
    assert len({prompts_hash(prompts) for prompts in [base, *others]}) == 6


GOOD = {"prompt_id": "a", "turns": ["x"]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'prompt': 'x'}", "line 2 is not JSON"),
        ('["x"]', "line 2 is a list"),
        ({"text": "x"}, 'neither "turns" nor "prompt" (its keys: text)'),
        ({"prompt": "x", "turns": ["x"]}, 'both "turns" and "prompt"'),
        ({"turns": "x"}, '"turns" is not a list'),
        ({"turns": []}, '"turns" is not a list'),
        ({"turns": ["x", "  "]}, "turn 2 is '  '"),
        ({"turns": [{"role": "user"}]}, "turn 1 is {'role': 'user'}"),
        ({"prompt": None}, "turn 1 is None"),
        ({"prompt": "x", "category": 3}, "category=3"),
        ({"prompt": "x", "id": 1.5}, "id=1.5"),
        ({"prompt": "x", "id": ""}, "id=''"),
        ({"prompt": "x", "id": 1, "question_id": 2}, "question_id and id"),
        ({"prompt": "x", "prompt_id": "a"}, "line 1 and line 2 both are 'a'"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path: Path, line: object, message: str):
    path = write(tmp_path / "bad.jsonl", GOOD, line)
    with pytest.raises(UserError) as error:
        load_prompts(path)
    assert message in str(error.value)
    assert "2" in str(error.value)


def test_bad_arguments_say_what_is_allowed(tmp_path: Path):
    with pytest.raises(UserError, match=r"neither a bundled set nor a file. Bundled: .*selfspec48"):
        load_prompts("selfspec49")
    with pytest.raises(UserError, match="is a folder"):
        load_prompts(tmp_path)
    with pytest.raises(UserError, match="no category 'maths'. It has: chat, code, math"):
        load_prompts("selfspec48", categories=["maths"])
    with pytest.raises(UserError, match="leaves no prompt"):
        load_prompts("selfspec48", categories=[])
    for limit in (0, -1, True, 2.5):
        with pytest.raises(UserError, match="Give 1 or more"):
            load_prompts("selfspec48", limit=limit)
    with pytest.raises(UserError, match="holds no prompt"):
        load_prompts(write(tmp_path / "empty.jsonl", "", " "))
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(UserError, match="not UTF-8"):
        load_prompts(binary)


def test_config_is_checked(tmp_path: Path):
    assert len(prompts_from_config({"name": "selfspec48", "categories": ["math"], "limit": 3})) == 3
    path = write(tmp_path / "mine.jsonl", GOOD)
    assert prompts_from_config({"path": str(path), "categories": None, "limit": None}) == load_prompts(path)
    for config, message in [
        ({}, "not neither"),
        ({"name": "selfspec48", "path": str(path)}, "not both"),
        ({"name": "selfspec48", "limits": 3}, "prompts.limits is unknown"),
        ({"name": "selfspec48", "categories": "math"}, "is not a list"),
        ({"name": str(path)}, "neither a bundled set nor a file"),
    ]:
        with pytest.raises(UserError, match=message):
            prompts_from_config(config)


# ---- splits


def test_the_two_bundled_sets_are_for_choosing_and_for_reporting_and_share_no_prompt():
    tune, report = load_prompts("selfspec_tune24"), load_prompts("selfspec48")
    assert Counter(prompt.category for prompt in tune) == dict.fromkeys(CATEGORIES, 4)
    assert {prompt.split for prompt in tune} == {"tune"} and {prompt.split for prompt in report} == {"report"}
    check_apart(report, ["selfspec_tune24"])


def test_a_prompt_that_settings_were_chosen_on_cannot_be_reported_on(tmp_path: Path):
    seen = load_prompts("selfspec48")[5].turns[0]
    path = write(tmp_path / "tuned.jsonl", {"prompt": "Another."}, {"prompt": f"  {seen} "})
    with pytest.raises(UserError, match=r"1 prompts of this run, for example 'chat-06', are in .*tuned_on"):
        check_apart(load_prompts("selfspec48"), [path])
    both = write(tmp_path / "both.jsonl", {"prompt": "New.", "split": "tune"}, {"prompt": seen, "split": "report"})
    check_apart(load_prompts("selfspec48"), [f"{both}#tune"])
    with pytest.raises(UserError, match="tuned_on"):
        check_apart(load_prompts("selfspec48"), [both])


@pytest.mark.parametrize("ids", [["a"], ["a", "b"], ["a", *map(str, range(40))]], ids=len)
def test_a_file_without_splits_is_all_for_reporting(ids: list[str], tmp_path: Path):
    """However few prompts it holds, and whatever is kept of it: by the hash, the first would be for tuning."""
    assert split_of(ids[0]) == "tune"
    path = write(tmp_path / "mine.jsonl", *({"id": name, "prompt": f"text {name}"} for name in ids))
    for config in ({}, {"limit": 1}, {"categories": ["default"]}):
        found = prompts_from_config({"path": str(path), **config})
        assert found and {prompt.split for prompt in found} == {"report"}


def test_in_a_file_with_some_splits_the_other_prompts_are_for_reporting(tmp_path: Path):
    assert split_of("a") == "tune"
    path = write(tmp_path / "mine.jsonl", {"id": "b", "prompt": "B", "split": "tune"}, {"id": "a", "prompt": "A"})
    for split, kept in (("tune", ["b"]), ("report", ["a"])):
        assert [prompt.prompt_id for prompt in load_prompts(path, split=split)] == kept
    assert [prompt.split for prompt in load_prompts(path)] == ["tune", "report"]


def test_a_half_of_a_small_file_that_is_empty_says_how_to_fill_it(tmp_path: Path):
    path = write(tmp_path / "one.jsonl", {"id": "a", "prompt": "A"})
    with pytest.raises(UserError, match=r"leaves no prompt of one\.jsonl.*by a hash of the ids.*Mark some"):
        load_prompts(path, split="report")


def test_a_file_without_splits_is_halved_by_id_the_same_way_everywhere(tmp_path: Path):
    path = write(tmp_path / "many.jsonl", *({"id": i, "prompt": f"text {i}"} for i in range(200)))
    parts = {split: load_prompts(path, split=split) for split in ("tune", "report")}
    assert all(80 <= len(part) <= 120 for part in parts.values())
    assert {p.prompt_id for p in parts["tune"]}.isdisjoint(p.prompt_id for p in parts["report"])
    assert split_of("81") == "report" and split_of("a") == "tune"  # fixed: tables depend on it


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "selfspec48", "split": "test"}, "Allowed: tune, report"),
        ({"name": "selfspec48", "split": "tune"}, "leaves no prompt"),
        ({"name": "selfspec48", "score": "bleu"}, "Allowed: rouge_l, exact_number"),
    ],
)
def test_a_split_or_a_score_that_does_not_exist_is_named(config: dict, message: str):
    with pytest.raises(UserError, match=message):
        prompts_from_config(config)
