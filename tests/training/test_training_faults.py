"""Full disks and misfits: one clear error, nothing half-written, and the same command goes on afterwards."""

from __future__ import annotations

import errno
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import selfspec.training.data as data_module
import tiny_models
from selfspec.errors import UserError
from selfspec.target import Target, wrap_target
from selfspec.training.checkpoints import STATE
from selfspec.training.data import DataConfig, load_dataset
from selfspec.training.job import train_draft
from selfspec.training.making import make_data
from selfspec.training.trainer import TrainConfig

DRAFT = dict(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1)
CONFIG = TrainConfig(
    steps=6,
    batch_rows=2,
    row_tokens=48,
    learning_rate=1e-2,
    warmup_steps=1,
    autocast=False,
    num_kept=8,
    log_every=1,
    validate_every=3,
    checkpoint_every=2,
)


def quiet(_: dict[str, Any]) -> None:
    pass


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The kernel refuses to write more into any file, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def partials(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.endswith(".partial")]


def test_a_full_disk_leaves_the_last_checkpoint_and_the_same_command_goes_on(
    chat_target: Target, data_folder: Callable[..., Path], tmp_path: Path
):
    data = data_folder()
    args = (chat_target, "independent", DRAFT, CONFIG, data)
    train_draft(*args, tmp_path / "whole", "c", quiet)
    full: list[Any] = []

    def fills_at_step_3(record: dict[str, Any]) -> None:
        if record.get("step") == 3 and not full:
            full.append(files_of_at_most(4096))
            full[0].__enter__()

    try:
        with pytest.raises(UserError, match=r"Cannot write .*Nothing half-written was left"):
            train_draft(*args, tmp_path / "cut", "c", fills_at_step_3)
    finally:
        full[0].__exit__(None, None, None)
    assert not partials(tmp_path / "cut") and not (tmp_path / "cut" / "model.safetensors").exists()
    assert all(torch.isfinite(tensor).all() for tensor in load_file(tmp_path / "cut" / STATE).values())
    train_draft(*args, tmp_path / "cut", "c", quiet)
    whole, cut = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_a_full_disk_at_the_end_leaves_no_half_draft(
    chat_target: Target, data_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    data, out = data_folder(), tmp_path / "o"
    args = (chat_target, "independent", DRAFT, CONFIG, data, out, "c", quiet)

    def half(self: Any, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"half of the weights")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("selfspec.training.independent.IndependentTrainee.save", half)
        with pytest.raises(UserError, match="No space left on device.*the same command goes on"):
            train_draft(*args)
    assert not (out / "model.safetensors").exists() and not (out / "config.json").exists() and not partials(out)
    trained = (out / "log.jsonl").read_text().splitlines()
    train_draft(*args)
    assert (out / "model.safetensors").exists() and not (out / STATE).exists()
    assert (out / "log.jsonl").read_text().splitlines()[:-1] == trained[:-1]  # not trained again, checked again


def test_a_full_disk_while_making_data_loses_no_shard(
    chat_target: Target, small_config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    prompts = [f"prompt number {i}" for i in range(30)]
    config = replace(small_config, answer_tokens=10_000)
    real, calls = data_module.save_file, [0]

    def fills_up(tensors: Any, path: Path, metadata: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            path.write_bytes(b"half a shard")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, path, metadata=metadata)

    with monkeypatch.context() as patch:
        patch.setattr(data_module, "save_file", fills_up)
        with pytest.raises(UserError, match="Cannot write .*shard-00002.*No space left"):
            make_data(chat_target, config, tmp_path / "d", prompts, lambda *_: None)
    assert not partials(tmp_path / "d")
    before = load_dataset(tmp_path / "d")
    assert len(before.train) + len(before.held_out) == 2 * config.shard_samples
    make_data(chat_target, config, tmp_path / "d", prompts, lambda *_: None)
    after = load_dataset(tmp_path / "d")
    assert sorted(s.index for s in [*after.train, *after.held_out]) == list(range(30))


def test_a_full_disk_while_keeping_distributions_leaves_no_half_file(
    chat_target: Target, data_folder: Callable[..., Path], tmp_path: Path
):
    data = data_folder()
    args = (chat_target, "independent", DRAFT, CONFIG, data, tmp_path / "o", "c", quiet)
    with files_of_at_most(512), pytest.raises(UserError, match="Cannot write .*teacher-"):
        train_draft(*args)
    assert not partials(data) and not (tmp_path / "o").exists()
    train_draft(*args)


def test_more_heads_than_an_answer_has_tokens_are_a_user_error(
    chat_target: Target, data_folder: Callable[..., Path], tmp_path: Path
):
    data = data_folder(answer_len=3)  # the longest has 5
    six = wrap_target(tiny_models.tiny_llama(vocab_size=258, num_layers=6), chat_target.tokenizer)
    for kind, option in (("medusa", "num_heads"), ("eagle3", "num_steps")):
        with pytest.raises(UserError, match="6 positions .*no answer in the data is longer than 5"):
            train_draft(six, kind, {option: 6}, CONFIG, data, tmp_path / "o", "c", quiet)
    assert not (tmp_path / "o").exists()


def test_samples_without_labels_are_left_out_and_change_nothing(
    chat_target: Target, small_config: DataConfig, identity: dict[str, object], tmp_path: Path
):
    labelled = [data_module.Sample(i, list(range(20 + i, 40 + i)), 9, 0.0, i % 4 == 3) for i in range(8)]
    no_answer = data_module.Sample(8, list(range(50, 60)), 10, 0.0, False)
    no_prompt = data_module.Sample(9, list(range(50, 60)), 0, 0.0, False)
    for name, samples in (("with", [*labelled, no_answer, no_prompt]), ("without", labelled)):
        (tmp_path / name).mkdir()
        data_module.write_shard(tmp_path / name, samples, {})
        data_module.write_manifest(tmp_path / name, small_config, identity)
        config = replace(CONFIG, steps=2)
        train_draft(chat_target, "independent", DRAFT, config, tmp_path / name, tmp_path / f"o-{name}", "c", quiet)
    weights = [load_file(tmp_path / f"o-{name}" / "model.safetensors") for name in ("with", "without")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_damaged_checkpoint_is_a_user_error(chat_target: Target, data_folder: Callable[..., Path], tmp_path: Path):
    data, out = data_folder(), tmp_path / "o"
    out.mkdir()
    (out / STATE).write_bytes(b"no tensors")
    with pytest.raises(UserError, match="checkpoint .* is damaged .*Remove it to begin anew"):
        train_draft(chat_target, "independent", DRAFT, CONFIG, data, out, "c", quiet)
