"""Prompts about texts of an earlier data folder, and training on several folders at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.target.byte_tokenizer import byte_tokenizer
from selfspec.training.data import DataConfig, Sample, load_dataset, write_manifest, write_shard
from selfspec.training.features import features_for, hidden_states
from selfspec.training.making import make_data
from selfspec.training.passage_prompts import PassageConfig, fill, passage_prompts, sentence_ends
from selfspec.training.self_prompts import is_held_out
from selfspec.training.teacher import distributions, teachers_for

CONFIG = PassageConfig(min_words=4, max_words=9, choices=["French"])
TEXT = "One bee flew very far away. Two bees stayed. Did the third one ever come back? It"


def filled(template: str, text: str = TEXT, config: PassageConfig = CONFIG) -> str | None:
    return fill(template, text, "What did they do?", config, np.random.default_rng(0))


def test_a_template_is_filled_with_whole_sentences():
    assert filled("Sum up:\n{passage}") == "Sum up:\nOne bee flew very far away. Two bees stayed."
    assert filled("{passage} {question}", "One bee. " * 9) == "One bee. One bee. One bee. One bee. What did they do?"
    assert filled("In {choice}: {sentences}") == "In French: One bee flew very far away."
    assert filled("{passage}", "Too short.") is None
    assert filled("{passage}", "no sentence ends here at all, however long it is") is None
    assert filled("{sentences}", "A b. C d.") is None
    assert filled("{passage}", "Braces {question} of the text stay. They do.") == (
        "Braces {question} of the text stay. They do."
    )


def test_a_lists_numbers_end_no_sentence():
    text = "Do this:\n1. Wash it. \n2. Dry it!"
    assert [text[:end] for end in sentence_ends(text)] == ["Do this:\n1. Wash it.", text]


def test_code_comes_from_the_first_fenced_block():
    text = "Here:\n```python\nx = 1\n```\nand\n```\ny = 2\n```"
    assert filled("Explain:\n{code}", text) == "Explain:\nx = 1"
    assert filled("Explain:\n{code}") is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"templates": {"a": ["nothing of a text"]}}, "must hold {passage}"),
        ({"templates": {"a": ["{passage} {title}"]}}, "no other field than"),
        ({"templates": {"a": ["{passage} in {choice}"]}}, "choices is empty"),
        ({"templates": {"a": []}}, "is empty"),
        ({"count": 0}, "at least 1"),
        ({"min_words": 9, "max_words": 8}, "min_words <= max_words"),
    ],
)
def test_impossible_templates_are_user_errors(given: dict[str, object], message: str):
    with pytest.raises(UserError, match=message):
        PassageConfig(**given)  # type: ignore[arg-type]


@pytest.fixture
def written(chat_target: Target, small_config: DataConfig, identity: dict[str, object], tmp_path: Path) -> Path:
    """A folder of 30 readable chats."""
    template = "<s>u{}</s><s>a"
    tokenizer, samples = chat_target.tokenizer, []
    for i in range(30):
        prompt = tokenizer(template.format(f"question {i}")).input_ids
        answer = tokenizer(f"Answer {i} says this. It goes on for long. And on.</s>").input_ids
        samples.append(Sample(i, [*prompt, *answer], len(prompt), 0.0, held_out=i % 5 == 0))
    folder = tmp_path / "written"
    folder.mkdir()
    write_shard(folder, samples, {})
    write_manifest(folder, small_config, identity)
    return folder


TEMPLATES = {"short": ["Shorten: {passage}", "{passage} Why?"], "ask": ["{passage} {question}"]}


def test_prompts_about_passages_are_repeatable_and_keep_a_text_on_one_side(chat_target: Target, written: Path):
    config = replace(CONFIG, data=str(written), count=50, templates=TEMPLATES)
    prompts = passage_prompts(config, chat_target.tokenizer, seed=3)
    assert prompts == passage_prompts(config, chat_target.tokenizer, seed=3)
    assert prompts != passage_prompts(config, chat_target.tokenizer, seed=4)
    assert len(prompts) == len({prompt.text for prompt in prompts}) == 50
    asked = {prompt.text: prompt.origin for prompt in prompts}
    assert all(f"Answer {origin.split()[1]} says this." in text for text, origin in asked.items())
    assert len({prompt.origin for prompt in prompts}) <= 30
    both = [text for text in asked if text.endswith(asked[text])]
    assert 10 < len(both) < 40  # the kind "ask" is about half of them


def test_all_prompts_of_a_text_are_held_out_or_none(
    chat_target: Target, written: Path, small_config: DataConfig, tmp_path: Path
):
    config = replace(CONFIG, data=str(written), count=40, templates=TEMPLATES)
    prompts = passage_prompts(config, chat_target.tokenizer, seed=0)
    data = replace(small_config, answer_tokens=10_000, max_sequence_tokens=100, max_new_tokens=8)
    make_data(chat_target, data, tmp_path / "out", prompts, lambda *_: None)
    made = load_dataset(tmp_path / "out")
    for sample in [*made.train, *made.held_out]:
        origin = prompts[sample.index].origin
        assert sample.held_out == is_held_out(origin, data.held_out_share)


def test_several_folders_are_one_dataset(
    chat_target: Target,
    written: Path,
    data_folder: Callable[..., Path],
    small_config: DataConfig,
    identity: dict[str, object],
):
    other = data_folder(8)
    one, two, both = load_dataset(written), load_dataset(other), load_dataset([written, other])
    assert len(both.train) == len(one.train) + len(two.train)
    assert len({sample.index for sample in [*both.train, *both.held_out]}) == 38
    assert both.total("train_samples") == len(both.train)
    assert len({one.manifest_sha256, two.manifest_sha256, both.manifest_sha256}) == 3
    assert load_dataset([other, written]).manifest_sha256 != both.manifest_sha256

    teachers = teachers_for(chat_target, both, identity, num_kept=4, progress=lambda _: None)
    features = features_for(chat_target, both, identity, [1], lambda _: None)(both.train)
    last = both.train[-1]  # of the second folder
    assert (teachers[last.index].ids_AK == distributions(chat_target, [last], 4)[0].ids_AK).all()
    assert (features[-1] == hidden_states(chat_target, [last], [1])[0]).all()
    for bad in ([], [written, written]):
        with pytest.raises(UserError, match="each once"):
            load_dataset(bad)


def test_the_first_shards_of_each_folder_are_a_dataset_of_their_own(
    chat_target: Target,
    data_folder: Callable[..., Path],
    small_config: DataConfig,
    identity: dict[str, object],
    tmp_path: Path,
):
    folders = [data_folder(16).rename(tmp_path / "first"), data_folder(12)]
    both, begun = load_dataset(folders), load_dataset(folders, num_shards=1)
    assert len(both.shards) > 2 and [shard.path.name for shard in begun.shards] == ["shard-00000.safetensors"] * 2
    kept = [*begun.train, *begun.held_out]
    assert {sample.index for sample in kept} == {sample.index for shard in begun.shards for sample in shard.samples}
    assert begun.total("train_samples") == len(begun.train) < both.total("train_samples")
    answers = begun.total("train_answer_tokens") + begun.total("held_out_answer_tokens")
    assert answers == sum(sample.answer_len for sample in kept)
    assert begun.manifest_sha256 != both.manifest_sha256
    assert {load_dataset(folders, num_shards=n).manifest_sha256 for n in (2, 99)} == {both.manifest_sha256}
    write_shard(folders[1], [replace(both.train[0], index=99)], {})
    write_manifest(folders[1], small_config, identity)
    assert load_dataset(folders, num_shards=1).manifest_sha256 == begun.manifest_sha256, "the same text as before"
    teachers_for(chat_target, begun, identity, num_kept=4, progress=lambda _: None)
    assert [len(list(folder.glob("teacher-*/*"))) for folder in folders] == [1, 1]  # the target read no more
    with pytest.raises(UserError, match="data_shards=0"):
        load_dataset(folders, num_shards=0)


def test_a_prompt_held_out_in_one_folder_is_not_trained_on_in_another(
    written: Path, small_config: DataConfig, identity: dict[str, object], tmp_path: Path
):
    sample = load_dataset(written).held_out[0]
    copied = tmp_path / "copied"
    copied.mkdir()
    answered = replace(sample, token_ids=[*sample.token_ids[:-1], 65, 257], held_out=False)
    write_shard(copied, [answered, Sample(1, [256, 70, 71, 72], 2, 0.0, True), Sample(2, [1, 2, 3], 1, 0.0, False)], {})
    write_manifest(copied, small_config, identity)
    both = load_dataset([written, copied])
    heard = [s.token_ids[: s.prompt_len] for s in both.train]
    assert sample.token_ids[: sample.prompt_len] not in heard and [1] in heard


def test_passages_of_nothing_are_user_errors(chat_target: Target, written: Path):
    with pytest.raises(UserError, match="templates is empty"):
        passage_prompts(PassageConfig(data=str(written)), chat_target.tokenizer, 0)
    long = PassageConfig(data=str(written), min_words=170, templates={"a": ["{passage}"]})
    with pytest.raises(UserError, match="No answer in"):
        passage_prompts(long, byte_tokenizer(), 0)
