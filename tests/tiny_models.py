"""Tiny random models for tests: every family the target supports, seeded, small enough to check exactly and often.

Weights are drawn wide (std 0.5), so that logits differ clearly from token to token: with HF's default init the argmax
of a random model hardly depends on its input, and a test that compares tokens would pass for the wrong reasons. What a
family does differently is set so that leaving it out shows: windows and caps far below what the tests reach, factors
far from one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers import LlamaForCausalLM as LlamaForCausalLM

VOCAB_SIZE = 97
EOS_TOKEN_ID = 2
WINDOW = 8  # much shorter than the tests' sequences, so that a missing one shows
HEAD_DIM = 16  # not hidden_size / num_heads


@dataclass(frozen=True)
class Tiny:
    """A family or a variant of one: transformers' model type, and what to set beside the common shape."""

    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    unlike: tuple[str, ...] = ()  # parts of the common shape that this configuration does not have
    note: str = ""  # what its layers do differently by themselves, for the family table


MULTI_HEAD = ("num_key_value_heads",)
FIXED_SHAPE = (*MULTI_HEAD, "intermediate_size")
SOFT_CAPPED = dict(head_dim=HEAD_DIM, sliding_window=WINDOW, query_pre_attn_scalar=24, final_logit_softcapping=8.0)
TINY: dict[str, Tiny] = {
    "llama": Tiny("llama"),
    "mistral": Tiny("mistral", {"sliding_window": WINDOW}),
    "qwen2": Tiny("qwen2", {"use_sliding_window": False}, note="biases on q, k and v"),
    "qwen3": Tiny("qwen3", {"use_sliding_window": False, "head_dim": HEAD_DIM}, note="norms on the heads' q and k"),
    "qwen2_sliding": Tiny("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "qwen3_moe": Tiny(
        "qwen3_moe",
        dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=HEAD_DIM, mlp_only_layers=[1]),
        note="2 of 6 experts per token",
    ),
    "gemma": Tiny("gemma", {"head_dim": HEAD_DIM}, note="scaled embeddings (in the module)"),
    "gemma2": Tiny("gemma2", SOFT_CAPPED | {"attn_logit_softcapping": 4.0}, note="soft-capped attention"),
    "gemma3_text": Tiny(
        "gemma3_text",
        SOFT_CAPPED
        | dict(
            sliding_window_pattern=2,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
        note="norms on the heads' q and k",
    ),
    "phi3": Tiny("phi3", {"sliding_window": WINDOW}, note="fused projections"),
    "phi3_longrope": Tiny(
        "phi3",
        dict(
            original_max_position_embeddings=128,
            rope_parameters=dict(
                rope_type="longrope",
                rope_theta=1e4,
                factor=2.0,
                short_factor=[1.0, 1.5, 2.0, 3.0],
                long_factor=[9.0] * 4,
            ),
        ),
        note="up to the original length",
    ),
    "smollm3": Tiny("smollm3", {"no_rope_layer_interval": 2}, note="no rotary in every second layer"),
    "olmo2": Tiny("olmo2", note="norms after the sublayers"),
    "granite": Tiny(
        "granite",
        dict(embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.4, attention_multiplier=0.2),
        note="scaled residuals and scores",
    ),
    "starcoder2": Tiny("starcoder2", {"sliding_window": WINDOW}, note="layer norms, biases"),
    "stablelm": Tiny("stablelm", {"use_qkv_bias": True}, note="rotary on a quarter of each head"),
    "stablelm_parallel": Tiny(
        "stablelm", {"use_parallel_residual": True, "qk_layernorm": True}, note="parallel residual, q and k norms"
    ),
    "cohere": Tiny("cohere", {"logit_scale": 0.25}, note="parallel residual, interleaved rotary"),
    "cohere_qk_norm": Tiny("cohere", {"logit_scale": 0.25, "use_qk_norm": True}, note="q and k norms"),
    "gpt2": Tiny("gpt2", {"scale_attn_by_inverse_layer_idx": True}, FIXED_SHAPE, note="scores scaled by layer"),
    "gpt_neox": Tiny(
        "gpt_neox",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        MULTI_HEAD,
        note="parallel residual, rotary on half of each head",
    ),
    "gpt_neox_sequential": Tiny("gpt_neox", {"use_parallel_residual": False}, MULTI_HEAD),
    "opt": Tiny("opt", {}, FIXED_SHAPE),
    "opt_post_norm": Tiny(
        "opt", {"do_layer_norm_before": False, "activation_function": "gelu"}, FIXED_SHAPE, note="no final norm"
    ),
    "falcon": Tiny(
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        FIXED_SHAPE,
        note="parallel residual, groups expanded before the cache",
    ),
    "falcon_multi_query": Tiny("falcon", {"bias": True}, FIXED_SHAPE, note="parallel residual"),
    "falcon_multi_head": Tiny("falcon", {"multi_query": False, "parallel_attn": False}, FIXED_SHAPE),
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
    **settings: Any,
) -> PreTrainedModel:
    """A random model of one of the names in TINY, in eval mode; further `settings` go to its configuration. The
    caller's random state is left alone.
    """
    tiny = TINY[family]
    shape = dict(
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
    common = {name: value for name, value in shape.items() if name not in tiny.unlike}
    config = CONFIG_MAPPING[tiny.model_type](**(common | tiny.settings | settings))
    with torch.random.fork_rng(devices=[]):
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    _fill(model, torch.Generator().manual_seed(seed))
    model.generation_config.eos_token_id = EOS_TOKEN_ID
    model.generation_config.pad_token_id = 0
    return model.to(dtype).eval()


@torch.no_grad()
def _fill(model: PreTrainedModel, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if name.endswith("bias"):
            parameter.copy_(0.1 * noise)
        elif "norm" in name or ".ln_" in name:
            parameter.add_(0.1 * noise)  # around one, or around zero where the layer adds the one itself
        else:
            parameter.copy_(0.5 * noise)


tiny_llama = partial(tiny_model, "llama")
tiny_mistral = partial(tiny_model, "mistral")
tiny_qwen2 = partial(tiny_model, "qwen2")
tiny_qwen3 = partial(tiny_model, "qwen3")

# The four that everything else is tested with, and all of them with their variants.
FAMILIES: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": tiny_llama,
    "mistral": tiny_mistral,
    "qwen2": tiny_qwen2,
    "qwen3": tiny_qwen3,
}
ALL_FAMILIES: dict[str, Callable[..., PreTrainedModel]] = {name: partial(tiny_model, name) for name in TINY}


def prompt_ids(length: int, *, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """`length` random token ids, none of them the padding, BOS or EOS id."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()
