"""Data made by the target: resume, manifest, splits, and every kind of bad folder."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from selfspec.errors import UserError
from selfspec.target import Target, wrap_target
from selfspec.training import generation
from selfspec.training.data import DataConfig, load_dataset, read_shard, shard_paths
from selfspec.training.generation import Finished, Request, Spent, generate_stream, pick
from selfspec.training.making import make_data
from selfspec.training.prompt_sources import PromptDatasetConfig, first_turn, read_dataset, read_prompts
from selfspec.training.self_prompts import chat_template, is_held_out, normalised, reject_reason


def no_report(*_: object) -> None:
    pass


PROMPTS = [f"prompt number {i}" for i in range(40)]


def everything(folder: Path) -> dict[int, tuple[list[int], bool]]:
    dataset = load_dataset(folder)
    return {s.index: (s.token_ids, s.held_out) for s in [*dataset.train, *dataset.held_out]}


def test_rows_of_a_stream_write_what_generate_writes(chat_target: Target):
    prompts = [[60 + i + j for j in range(n)] for i, n in enumerate((3, 9, 80, 14, 30, 65, 7))]  # short and long ones
    waiting = [Request(i, ids, 12) for i, ids in enumerate(prompts)]
    spent = Spent()
    got: dict[int, list[int]] = {}

    def next_request(finished: Finished | None) -> Request | None:
        if finished:
            got[finished.request.index] = finished.new_ids
        return waiting.pop(0) if waiting else None

    generate_stream(chat_target, next_request, rows=2, capacity=100, seed=0, eos_ids=[257], spent=spent)
    assert spent.prompts_s > 0 and spent.slots_read >= spent.slots_held > 0
    for i, ids in enumerate(prompts):
        whole = chat_target.hf_model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert got[i] == whole[0, len(ids) :].tolist()


def test_rows_that_change_places_write_what_they_write_alone_and_read_less(
    chat_target: Target, monkeypatch: pytest.MonkeyPatch
):
    lengths = [(11 * i) % 190 + 1 for i in range(24)]
    requests = [
        Request(i, [60 + (i + j) % 150 for j in range(n)], 5 + i % 30, temperature=0.8 * (i % 2), min_p=0.02)
        for i, n in enumerate(lengths)
    ]

    def written(rows: int) -> tuple[dict[int, list[int]], float]:
        waiting, got, spent = list(requests), dict[int, list[int]](), Spent()

        def next_request(finished: Finished | None) -> Request | None:
            if finished:
                got[finished.request.index] = finished.new_ids
            return waiting.pop(0) if waiting else None

        generate_stream(chat_target, next_request, rows=rows, capacity=250, seed=3, eos_ids=[257], spent=spent)
        return got, spent.slots_read / spent.slots_held

    alone, _ = written(1)
    at_once, read_at_once = written(7)
    monkeypatch.setattr(generation, "BESIDE", 2)
    monkeypatch.setattr(generation, "SORT_EVERY", 3)
    beside, read_beside = written(7)
    assert alone == at_once == beside and set(alone) == set(range(24))
    assert read_beside < 0.8 * read_at_once


@pytest.mark.parametrize("vocab", [40, 256, 1000])
def test_a_draw_inverts_the_distribution_function(vocab: int):
    """Against float64 over the whole vocabulary; weights are powers of two, so that float32 sums are exact as well."""
    powers = torch.randint(-6, 1, (200, vocab), generator=torch.Generator().manual_seed(0))
    logits = powers * math.log(2)
    min_p = torch.tensor([0.0, 0.1]).repeat(100)
    uniform = torch.rand(200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    temperature = torch.ones(200)
    temperature[::5] = 0
    drawn = pick(logits, temperature, min_p, uniform)
    weights = torch.exp2(powers.double())
    weights[weights < min_p.double()[:, None] * weights.amax(-1, keepdim=True)] = 0
    reached = weights.cumsum(-1)
    expected = torch.searchsorted(reached, uniform[:, None] * reached[:, -1:], right=True)[:, 0]
    expected[::5] = logits[::5].argmax(-1)
    assert int((drawn != expected).sum()) <= 1  # a goal that float32 rounds over an edge
    assert int((drawn == expected).sum()) >= 199


def test_a_draw_never_takes_a_token_without_probability():
    logits = torch.full((3, 600), -torch.inf)
    logits[:, [7, 300, 310]] = 0.0
    uniform = torch.tensor([0.0, 1 - 1e-12, 0.5], dtype=torch.float64)  # the second one is 1 in float32
    assert pick(logits, torch.ones(3), torch.zeros(3), uniform).tolist() == [7, 310, 300]


def test_a_request_that_extends_its_rows_text_reuses_it(chat_target: Target):
    runs = []
    for fresh_first in (False, True):
        waiting = [Request(1, [70, 71, 72], 6), *([Request(3, [90] * 9, 2)] if fresh_first else [])]
        got: list[int] = []

        def next_request(finished, waiting=waiting, got=got):
            if finished and finished.request.index == 1:
                waiting.append(Request(2, [70, 71, 72, 80, 81], 6))
            if finished and finished.request.index == 2:
                got.extend(finished.new_ids)
            return waiting.pop(0) if waiting else None

        generate_stream(chat_target, next_request, rows=1, capacity=30, seed=0, eos_ids=[257])
        runs.append(got)
    assert runs[0] and runs[0] == runs[1]


DatasetOf = Callable[[str, list[dict[str, object]]], PromptDatasetConfig]


@pytest.fixture
def dataset_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DatasetOf:
    """A folder of parquet files as it lies in a hub repository, read without a network."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def build(column: str, entries: list[dict[str, object]]) -> PromptDatasetConfig:
        (tmp_path / "hub").mkdir(exist_ok=True)
        datasets.Dataset.from_list(entries).to_parquet(tmp_path / "hub" / "train-00000-of-00001.parquet")
        return PromptDatasetConfig(path=str(tmp_path / "hub"), column=column)

    return build


def test_prompts_of_a_dataset(dataset_of: DatasetOf):
    config = dataset_of(
        "prompt", [{"prompt": " What is this? ", "n": 1}, {"prompt": "", "n": 2}, {"prompt": "b", "n": 3}]
    )
    assert read_dataset(config) == ["What is this?", "b"]
    assert read_dataset(replace(config, split="train[:1]")) == ["What is this?"]
    file = Path(config.path or "") / "train-00000-of-00001.parquet"
    assert read_dataset(replace(config, path=str(file))) == ["What is this?", "b"]
    for changed, match in (
        (dict(column="text"), "no column 'text'.*one of: prompt, n"),
        (dict(column="n"), "entry 0: column 'n' holds no prompt, but 1"),
        (dict(split="test"), "Cannot read the dataset .*split"),
        (dict(split="train[1:2]"), "holds no prompts"),
        (dict(path="someone/chats"), "revision=None does not pin someone/chats"),
        (dict(path="someone/chats", revision="main"), "revision=main does not pin"),
    ):
        with pytest.raises(UserError, match=match):
            read_dataset(replace(config, **changed))


def test_a_dataset_out_of_reach_or_without_its_package_is_a_user_error(
    dataset_of: DatasetOf, monkeypatch: pytest.MonkeyPatch
):
    import datasets

    asked: list[dict[str, object]] = []

    def unreachable(path: str, **named: object) -> None:
        asked.append({"path": path, **named})
        raise ConnectionError("Couldn't reach 'someone/chats' on the Hub")

    config = replace(dataset_of("prompt", [{"prompt": "a"}]), path="someone/chats", revision="0" * 40)
    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UserError, match="Couldn't reach 'someone/chats'.*no network"):
        read_dataset(config)
    assert asked == [{"path": "someone/chats", "revision": "0" * 40, "split": "train"}]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"selfspec\[data\]"):
        read_dataset(config)


def test_the_first_user_turn_is_the_prompt():
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": " hello "}]
    shared = [{"from": "human", "value": "hi there"}, {"from": "gpt", "value": "yes"}]
    values = ["a ", ["b", "c"], chat, shared, [], None, 3, [{"role": "system", "content": "x"}]]
    assert [first_turn(value) for value in values] == ["a", "b", "hello", "hi there", "", None, None, None]


def test_a_folder_is_only_added_to_with_the_same_prompts(chat_target: Target, small_config: DataConfig, tmp_path: Path):
    manifest = make_data(chat_target, small_config, tmp_path / "d", PROMPTS, no_report)
    assert manifest["prompts"]["count"] == len(PROMPTS)
    with pytest.raises(UserError, match=r"prompts: .*'count': 40.* there, .*'count': 39.* now"):
        make_data(chat_target, small_config, tmp_path / "d", PROMPTS[1:], no_report)
    with pytest.raises(UserError, match="prompts: .* there, None now"):
        make_data(chat_target, small_config, tmp_path / "d", None, no_report)
    older = json.loads((tmp_path / "d" / "manifest.json").read_text())
    del older["prompts"]
    (tmp_path / "d" / "manifest.json").write_text(json.dumps(older))
    make_data(chat_target, replace(small_config, answer_tokens=200), tmp_path / "d", PROMPTS, no_report)


def test_a_base_model_answers_given_prompts_as_they_are(small_config: DataConfig, tmp_path: Path):
    import tiny_models
    from selfspec.target.byte_tokenizer import byte_tokenizer

    target = wrap_target(tiny_models.tiny_llama(vocab_size=257, num_layers=2, max_positions=128), byte_tokenizer())
    make_data(target, small_config, tmp_path / "d", PROMPTS, no_report)
    dataset = load_dataset(tmp_path / "d")
    for sample in [*dataset.train, *dataset.held_out]:
        assert sample.token_ids[: sample.prompt_len] == target.tokenizer(PROMPTS[sample.index]).input_ids
    with pytest.raises(UserError, match="no chat template"):
        make_data(target, small_config, tmp_path / "e", None, no_report)


def test_too_long_a_request_is_a_user_error(chat_target: Target):
    with pytest.raises(UserError, match="capacity of 10"):
        generate_stream(chat_target, lambda _: Request(0, [5] * 8, 3), rows=1, capacity=10, seed=0, eos_ids=[])


def test_interrupted_and_resumed_data_equal_uninterrupted_data(
    chat_target: Target, small_config: DataConfig, tmp_path: Path
):
    config = replace(small_config, answer_tokens=10_000)  # all 40 prompts
    make_data(chat_target, config, tmp_path / "whole", PROMPTS, no_report)

    class Killed(Exception):
        pass

    import selfspec.training.making as making

    real, calls = making.write_shard, [0]

    def dies_at_third(*args):
        calls[0] += 1
        if calls[0] == 3:
            raise Killed
        return real(*args)

    making.write_shard = dies_at_third
    try:
        with pytest.raises(Killed):
            make_data(chat_target, config, tmp_path / "cut", PROMPTS, no_report)
    finally:
        making.write_shard = real
    assert len(shard_paths(tmp_path / "cut")) == 2
    make_data(chat_target, config, tmp_path / "cut", PROMPTS, no_report)
    assert everything(tmp_path / "cut") == everything(tmp_path / "whole")
    assert len(everything(tmp_path / "whole")) == len(PROMPTS)


def test_a_shard_that_is_removed_is_made_again_and_no_other_is_overwritten(
    chat_target: Target, small_config: DataConfig, tmp_path: Path
):
    config = replace(small_config, answer_tokens=10_000)  # all 40 prompts
    folder = tmp_path / "d"
    make_data(chat_target, config, folder, PROMPTS, no_report)
    whole, paths = everything(folder), shard_paths(folder)
    assert len(paths) > 2
    paths[1].unlink()
    with pytest.raises(UserError, match="run make_data again"):
        load_dataset(folder)
    make_data(chat_target, config, folder, PROMPTS, no_report)
    assert everything(folder) == whole


def test_the_manifest_and_its_hash_stay_where_no_text_is_added(
    chat_target: Target, small_config: DataConfig, tmp_path: Path
):
    make_data(chat_target, small_config, tmp_path / "d", PROMPTS, no_report)
    before = load_dataset(tmp_path / "d").manifest_sha256
    make_data(chat_target, replace(small_config, answer_tokens=1, rows=3), tmp_path / "d", PROMPTS, no_report)
    assert load_dataset(tmp_path / "d").manifest_sha256 == before
    make_data(chat_target, replace(small_config, answer_tokens=10_000), tmp_path / "d", PROMPTS, no_report)
    assert load_dataset(tmp_path / "d").manifest_sha256 != before


def test_self_written_prompts_make_a_data_set_with_a_manifest(
    chat_target: Target, small_config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("selfspec.training.self_prompts.reject_reason", lambda *_: None)  # random text is no prose
    config = replace(small_config, openers=["Write a"], bare_share=0.5, max_prompt_tokens=12)
    chat_target.tokenizer.clean_up_tokenization_spaces = False
    eos_often = replace(config, prompt_temperature=50.0, prompt_min_p=0.0)  # 1 in 258 tokens is EOS
    manifest = make_data(chat_target, eos_often, tmp_path / "d", None, no_report)
    assert manifest["totals"]["train_answer_tokens"] + manifest["totals"]["held_out_answer_tokens"] >= 120
    assert manifest["rejected_prompts"]["too_long"] > 0
    assert sum(s["answer_tokens"] for s in manifest["shards"]) >= 120
    samples = [s for path in shard_paths(tmp_path / "d") for s in read_shard(path)[0]]
    before = chat_template(chat_target.tokenizer).before
    assert all(chat_target.tokenizer.decode(s.token_ids).startswith(before) for s in samples)


def test_no_prompt_is_in_both_splits_and_duplicates_are_dropped(
    chat_target: Target, small_config: DataConfig, tmp_path: Path
):
    doubled = [*PROMPTS, *(p.upper() + "!" for p in PROMPTS)]
    make_data(chat_target, replace(small_config, answer_tokens=10_000), tmp_path / "d", doubled, no_report)
    dataset = load_dataset(tmp_path / "d")
    assert len(dataset.train) + len(dataset.held_out) == len(PROMPTS)
    assert dataset.manifests[tmp_path / "d"]["rejected_prompts"] == {"duplicate": len(PROMPTS)}
    train = {normalised(chat_target.tokenizer.decode(s.token_ids[: s.prompt_len])) for s in dataset.train}
    held_out = {normalised(chat_target.tokenizer.decode(s.token_ids[: s.prompt_len])) for s in dataset.held_out}
    assert train and held_out and not train & held_out
    assert is_held_out("Same, prompt", 0.5) == is_held_out("same PROMPT!", 0.5)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("Hi", "too_short"),
        ("What is this \ufffd thing", "broken_text"),
        ("What is </s> this thing", "special_token"),
        ("do it again " * 10, "repetitive"),
        ("Why is the sky blue at noon?", None),
    ],
)
def test_prompt_filter(prompt: str, reason: str | None):
    assert reject_reason(prompt, ["</s>"]) == reason


def test_other_settings_or_another_target_do_not_mix(chat_target: Target, small_config: DataConfig, tmp_path: Path):
    make_data(chat_target, small_config, tmp_path / "d", PROMPTS, no_report)
    with pytest.raises(UserError, match="seed: 0 there, 1 now"):
        make_data(chat_target, replace(small_config, seed=1), tmp_path / "d", PROMPTS, no_report)
    import tiny_models

    other = tiny_models.tiny_llama(vocab_size=258, num_layers=2, max_positions=128, seed=9)
    with pytest.raises(UserError, match="target"):
        make_data(wrap_target(other, chat_target.tokenizer), small_config, tmp_path / "d", PROMPTS, no_report)
    make_data(chat_target, replace(small_config, rows=2), tmp_path / "d", PROMPTS, no_report)  # how, not what


def test_two_writers_are_kept_apart(chat_target: Target, small_config: DataConfig, tmp_path: Path):
    with FileLock(tmp_path / ".lock"), pytest.raises(UserError, match="Another process"):
        make_data(chat_target, small_config, tmp_path, PROMPTS, no_report)


def test_bad_folders_are_user_errors(data_folder, tmp_path: Path):
    with pytest.raises(UserError, match="No training data"):
        load_dataset(tmp_path / "nothing")
    folder = data_folder()
    shard = shard_paths(folder)[0]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-20])
    with pytest.raises(UserError, match="not the file the manifest lists"):
        load_dataset(folder)
    with pytest.raises(UserError, match="damaged"):
        read_shard(shard)
    shard.unlink()
    with pytest.raises(UserError, match="missing"):
        load_dataset(folder)


def test_data_without_answers_or_without_held_out_text_is_a_user_error(data_folder):
    folder = data_folder(answer_len=0)
    with pytest.raises(UserError, match="no answer tokens"):
        load_dataset(folder)


def test_no_held_out_text_is_a_user_error(data_folder):
    folder = data_folder(count=3)  # every fourth is held out
    with pytest.raises(UserError, match="held-out split"):
        load_dataset(folder)


def test_a_tokenizer_without_template_or_with_a_strange_one_is_a_user_error(chat_target: Target):
    from selfspec.target.byte_tokenizer import byte_tokenizer

    with pytest.raises(UserError, match="no chat template"):
        chat_template(byte_tokenizer())
    strange = byte_tokenizer()
    strange.chat_template = "{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}"
    with pytest.raises(UserError, match="2 times"):
        chat_template(strange)


def test_prompt_files(tmp_path: Path):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": "a b"}) + "\n\n" + json.dumps({"turns": ["c", "d"]}) + "\n")
    assert read_prompts(path) == ["a b", "c"]
    for text, what in (("{", "line 1"), ('{"x": 1}', "line 1"), ('{"prompt": " "}', "empty"), ("", "no prompts")):
        path.write_text(text)
        with pytest.raises(UserError, match=what):
            read_prompts(path)
    with pytest.raises(UserError, match="No prompt file"):
        read_prompts(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    "bad", [dict(rows=0), dict(greedy_share=2.0), dict(answer_temperatures=[1.0, 0.5]), dict(max_new_tokens=351)]
)
def test_impossible_settings_are_user_errors(bad: dict[str, object]):
    with pytest.raises(UserError):
        DataConfig(**bad)
