"""Tiny random models for tests: every family the target supports, seeded, small enough to check exactly and often.

Weights are drawn wide (std 0.5), so that logits differ clearly from token to token: with HF's default init the argmax
of a random model hardly depends on its input, and a test that compares tokens would pass for the wrong reasons.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 97
EOS_TOKEN_ID = 2
CLASSES: dict[str, tuple[type, type]] = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "mistral": (MistralForCausalLM, MistralConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),  # biases on the q, k and v projections
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),  # a norm on each head's queries and keys
}


def tiny_model(
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    tied: bool = False,
    num_layers: int = 4,
    hidden_size: int = 32,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    vocab_size: int = VOCAB_SIZE,
    max_positions: int = 256,
    sliding_window: int | None = 8,  # mistral: much shorter than the tests' sequences, so that a missing one shows
    head_dim: int = 16,  # qwen3: not hidden_size / num_heads
) -> PreTrainedModel:
    """A random model of one of the families in CLASSES, in eval mode. The caller's random state is left alone."""
    only_here: dict[str, dict[str, Any]] = {
        "mistral": {"sliding_window": sliding_window},
        "qwen2": {"use_sliding_window": False},
        "qwen3": {"use_sliding_window": False, "head_dim": head_dim},
    }
    model_class, config_class = CLASSES[family]
    config = config_class(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=0,
        attn_implementation="eager",
        **only_here.get(family, {}),
    )
    with torch.random.fork_rng(devices=[]):
        model = model_class(config)
    _fill(model, torch.Generator().manual_seed(seed))
    model.generation_config.eos_token_id = EOS_TOKEN_ID
    model.generation_config.pad_token_id = 0
    return model.to(dtype).eval()


@torch.no_grad()
def _fill(model: PreTrainedModel, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.dim() == 1 and "norm" in name:
            parameter.copy_(1.0 + 0.1 * noise)
        else:
            parameter.copy_(noise * (0.5 if parameter.dim() == 2 else 0.1))


tiny_llama = partial(tiny_model, "llama")
tiny_mistral = partial(tiny_model, "mistral")
tiny_qwen2 = partial(tiny_model, "qwen2")
tiny_qwen3 = partial(tiny_model, "qwen3")

FAMILIES: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": tiny_llama,
    "mistral": tiny_mistral,
    "qwen2": tiny_qwen2,
    "qwen3": tiny_qwen3,
}


def prompt_ids(length: int, *, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """`length` random token ids, none of them the padding, BOS or EOS id."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()
