"""A tiny chat target that can do all the real one does in training: write prompts and answers, be learnt from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import tiny_models
from selfspec.target import Target, wrap_target
from selfspec.target.byte_tokenizer import byte_tokenizer
from selfspec.training.data import DataConfig, Sample, write_manifest, write_shard
from selfspec.training.identity import target_identity
from selfspec.training.self_prompts import chat_template

TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'][0] }}{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>a{% endif %}"
)


@pytest.fixture(scope="session")
def chat_target() -> Target:
    """Random weights over bytes plus <s> (256) and </s> (257, the EOS)."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer.chat_template = TEMPLATE
    model = tiny_models.tiny_llama(vocab_size=258, num_layers=2, max_positions=128)
    model.generation_config.eos_token_id = 257
    model.config.eos_token_id = 257
    return wrap_target(model, tokenizer, "tiny-chat")


@pytest.fixture
def identity(chat_target: Target) -> dict[str, object]:
    template = chat_template(chat_target.tokenizer)
    return target_identity(chat_target, template.before + template.after)


@pytest.fixture
def small_config() -> DataConfig:
    return DataConfig(
        answer_tokens=120,
        rows=4,
        shard_samples=3,
        max_sequence_tokens=60,
        max_prompt_tokens=30,
        max_new_tokens=16,
        held_out_share=0.3,
    )


@pytest.fixture
def data_folder(tmp_path: Path, small_config: DataConfig, identity: dict[str, object]) -> Callable[[int], Path]:
    """A folder of `count` samples with given random text, every fourth held out: no generation needed."""

    def build(count: int = 16, answer_len: int = 12) -> Path:
        folder = tmp_path / "data"
        folder.mkdir()
        draw = np.random.default_rng(0)
        samples = [
            Sample(
                index=i,
                token_ids=draw.integers(3, 250, 10 + answer_len + i % 3 * (answer_len > 0)).tolist(),
                prompt_len=10,
                temperature=0.0 if i % 2 else 1.0,
                held_out=i % 4 == 3,
            )
            for i in range(count)
        ]
        write_shard(folder, samples[: count // 2], {})
        write_shard(folder, samples[count // 2 :], {count: "duplicate"})
        write_manifest(folder, small_config, identity)
        return folder

    return build
