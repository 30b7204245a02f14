"""Tiny random models for tests: every family the target supports, seeded, small enough to check exactly and often.

Weights are drawn wide (std 0.5), so that logits differ clearly from token to token: with HF's default init the argmax
of a random model hardly depends on its input, and a test that compares tokens would pass for the wrong reasons.
"""

from __future__ import annotations

from collections.abc import Callable

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


def _shape(
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    tied: bool,
    max_positions: int,
) -> dict[str, object]:
    return dict(
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
    )


def _build(model_class: type, config: object, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """The model in eval mode, its weights from a generator of its own: the caller's random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() == 1 and "norm" in name:
                parameter.copy_(1.0 + 0.1 * noise)
            else:
                parameter.copy_(noise * (0.5 if parameter.dim() == 2 else 0.1))
    model.generation_config.eos_token_id = EOS_TOKEN_ID
    model.generation_config.pad_token_id = 0
    return model.to(dtype).eval()


def tiny_llama(
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
) -> PreTrainedModel:
    shape = _shape(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        tied=tied,
        max_positions=max_positions,
    )
    return _build(LlamaForCausalLM, LlamaConfig(**shape), dtype, seed)


def tiny_mistral(
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
    sliding_window: int | None = 8,
) -> PreTrainedModel:
    """Mistral with a window much shorter than the tests' sequences, so that a missing window shows."""
    shape = _shape(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        tied=tied,
        max_positions=max_positions,
    )
    return _build(MistralForCausalLM, MistralConfig(sliding_window=sliding_window, **shape), dtype, seed)


def tiny_qwen2(
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
) -> PreTrainedModel:
    """Qwen2: biases on the q, k and v projections."""
    shape = _shape(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        tied=tied,
        max_positions=max_positions,
    )
    return _build(Qwen2ForCausalLM, Qwen2Config(use_sliding_window=False, **shape), dtype, seed)


def tiny_qwen3(
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
    head_dim: int = 16,
) -> PreTrainedModel:
    """Qwen3: a norm on each head's queries and keys, and a head dimension that is not hidden_size / num_heads."""
    shape = _shape(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        tied=tied,
        max_positions=max_positions,
    )
    return _build(Qwen3ForCausalLM, Qwen3Config(head_dim=head_dim, use_sliding_window=False, **shape), dtype, seed)


FAMILIES: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": tiny_llama,
    "mistral": tiny_mistral,
    "qwen2": tiny_qwen2,
    "qwen3": tiny_qwen3,
}


def tiny_model(family: str, **options: object) -> PreTrainedModel:
    """`tiny_model("qwen3", dtype=torch.float64, tied=True)`: one of FAMILIES with the options of its function."""
    return FAMILIES[family](**options)


def prompt_ids(length: int, *, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """`length` random token ids, none of them the padding, BOS or EOS id."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()
