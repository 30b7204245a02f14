"""What differs between model families, declared in one place.

A family is where its parts are found, how one of its layers is called, and what happens before layer 0 and after the
head; everything else in selfspec is the same for all, and the layers themselves are transformers' own modules. A new
family is one entry in `FAMILIES` and one in `tests/tiny_models.py`; `experiments/family_table.py` then checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from selfspec.errors import UserError
from selfspec.target.attention import IMPLEMENTATION

FULL, SLIDING = "full_attention", "sliding_attention"
# rotary tables that depend on the length of the sequence so far: exact only while the first table is in use
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
# configuration fields of layers that fold the past into a state, which moving a length cannot roll back
RECURRENT_FIELDS = (
    *("state_size", "ssm_state_size", "mamba_d_state", "mamba_expand", "mamba_num_heads", "lru_width", "conv_L_cache"),
    *("linear_conv_kernel_dim", "linear_num_value_heads", "rescale_every"),
)


def full_attention(config: Any, layer: int) -> int | None:
    return None


def one_window(config: Any, layer: int) -> int | None:
    """All layers slide if the configuration gives a width."""
    return config.sliding_window


def window_by_layer_type(config: Any, layer: int) -> int | None:
    return config.sliding_window if config.layer_types[layer] == SLIDING else None


def grouped_heads(config: Any) -> tuple[int, int]:
    """(kv heads, head dim), both free."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_key_value_heads, head_dim


def divided_grouped_heads(config: Any) -> tuple[int, int]:
    """kv heads are free, the head dim is the width divided by the heads."""
    return config.num_key_value_heads, config.hidden_size // config.num_attention_heads


def every_head(config: Any) -> tuple[int, int]:
    """As many kv heads as query heads."""
    return config.num_attention_heads, config.hidden_size // config.num_attention_heads


def falcon_heads(config: Any) -> tuple[int, int]:
    """One kv head, or as many as query heads: the new architecture expands its groups before they are cached."""
    num_heads, head_dim = every_head(config)
    return 1 if config.multi_query and not config.new_decoder_architecture else num_heads, head_dim


def as_they_are(logits: Tensor, config: Any) -> Tensor:
    return logits


def soft_capped(logits: Tensor, config: Any) -> Tensor:
    """cap · tanh(logits / cap): Gemma 2 report, section 2."""
    cap = config.final_logit_softcapping
    return logits if cap is None else torch.tanh(logits / cap) * cap


@dataclass(frozen=True)
class Family:
    """Attribute paths inside the `...ForCausalLM` object, and what is done with what is found there."""

    embed: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"  # None in the model: no norm before the head
    head: str = "lm_head"
    rotary: str | None = "model.rotary_emb"
    rotary_by_layer_type: bool = False
    learned_positions: str | None = None  # a table added to what enters layer 0
    position_offset: int = 0  # rows at its start that belong to no position
    embed_scale: Callable[[Any], float] = lambda config: 1.0  # beyond what the embedding module does itself
    heads: Callable[[Any], tuple[int, int]] = grouped_heads  # what the cache holds per token: kv heads, head dim
    window: Callable[[Any, int], int | None] = full_attention  # of a layer, in tokens
    attention: str = IMPLEMENTATION  # or "sdpa", for layers that do not look into transformers' attention registry
    layer_arguments: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    finish_logits: Callable[[Tensor, Any], Tensor] = as_they_are
    refused: Mapping[str, Callable[[Any], bool]] = field(default_factory=lambda: MappingProxyType({}))
    free_shape: bool = True  # widths and heads are set by the names that Llama's configuration gives them
    # a layer's two halves: the module that adds to the residual, and what it alone is read through (a norm, ...)
    attention_parts: tuple[str, ...] = ("self_attn", "input_layernorm")
    mlp_parts: tuple[str, ...] = ("mlp", "post_attention_layernorm")
    parallel_residual: Callable[[Any], bool] = lambda config: False  # both halves read what enters the layer


BIDIRECTIONAL = {
    "use_bidirectional_attention: such a model does not predict the next token": lambda config: bool(
        getattr(config, "use_bidirectional_attention", None)
    )
}

FAMILIES: dict[str, Family] = {
    "llama": Family(),  # SmolLM2 is a Llama too
    "mistral": Family(window=one_window),
    "qwen2": Family(window=window_by_layer_type),
    "qwen3": Family(window=window_by_layer_type),
    "qwen3_moe": Family(window=one_window, free_shape=False),
    "gemma": Family(refused=BIDIRECTIONAL),
    # transformers 5.17 drops the cap of the attention scores with sdpa, its default: compare with attn "eager" there
    "gemma2": Family(
        window=window_by_layer_type,
        finish_logits=soft_capped,
        refused=BIDIRECTIONAL,
        attention_parts=("self_attn", "input_layernorm", "post_attention_layernorm"),
        mlp_parts=("mlp", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    "gemma3_text": Family(
        window=window_by_layer_type,
        rotary_by_layer_type=True,
        finish_logits=soft_capped,
        refused=BIDIRECTIONAL,
        attention_parts=("self_attn", "input_layernorm", "post_attention_layernorm"),
        mlp_parts=("mlp", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    "phi3": Family(window=one_window),
    "smollm3": Family(window=window_by_layer_type),  # layers without rotary decide that themselves
    "olmo2": Family(
        attention_parts=("self_attn", "post_attention_layernorm"), mlp_parts=("mlp", "post_feedforward_layernorm")
    ),
    "granite": Family(
        embed_scale=lambda config: config.embedding_multiplier,
        finish_logits=lambda logits, config: logits / config.logits_scaling,
    ),
    "starcoder2": Family(window=one_window),
    "stablelm": Family(
        heads=divided_grouped_heads,
        free_shape=False,
        attention_parts=("self_attn",),  # one norm for both where the residual is parallel
        mlp_parts=("mlp",),
        parallel_residual=lambda config: config.use_parallel_residual,
    ),
    "cohere": Family(
        finish_logits=lambda logits, config: logits * config.logit_scale,
        attention_parts=("self_attn",),
        mlp_parts=("mlp",),
        parallel_residual=lambda config: True,
    ),
    "gpt2": Family(
        embed="transformer.wte",
        layers="transformer.h",
        norm="transformer.ln_f",
        rotary=None,
        learned_positions="transformer.wpe",
        heads=every_head,
        free_shape=False,
        attention_parts=("attn", "ln_1"),
        mlp_parts=("mlp", "ln_2"),
        refused={"add_cross_attention: there is no encoder to attend to": lambda config: config.add_cross_attention},
    ),
    "gpt_neox": Family(
        embed="gpt_neox.embed_in",
        layers="gpt_neox.layers",
        norm="gpt_neox.final_layer_norm",
        rotary="gpt_neox.rotary_emb",
        heads=every_head,
        free_shape=False,
        attention_parts=("attention", "input_layernorm"),
        parallel_residual=lambda config: config.use_parallel_residual,
    ),
    "opt": Family(
        embed="model.decoder.embed_tokens",
        layers="model.decoder.layers",
        norm="model.decoder.final_layer_norm",
        rotary=None,
        learned_positions="model.decoder.embed_positions",
        position_offset=2,
        heads=every_head,
        free_shape=False,
        attention_parts=("self_attn", "self_attn_layer_norm"),
        mlp_parts=("fc2", "fc1", "final_layer_norm"),
        refused={
            "word_embed_proj_dim other than hidden_size: the head would read another width than the layers write": (
                lambda config: config.word_embed_proj_dim != config.hidden_size
            )
        },
    ),
    "falcon": Family(
        embed="transformer.word_embeddings",
        layers="transformer.h",
        norm="transformer.ln_f",
        rotary="transformer.rotary_emb",
        heads=falcon_heads,
        free_shape=False,
        attention="sdpa",
        attention_parts=("self_attention",),
        mlp_parts=("mlp",),
        parallel_residual=lambda config: config.parallel_attn or config.new_decoder_architecture,
        layer_arguments=MappingProxyType({"alibi": None}),
        refused={
            "alibi: its position biases are not in the mask": lambda config: config.alibi,
            "flash_attention_2: load it with attn_implementation='sdpa'": lambda config: (
                "flash" in str(config._attn_implementation)
            ),
        },
    ),
}


def family_of(config: Any) -> Family:
    """The family of a transformers config, or a `UserError` that says why there is none and what is supported."""
    name = getattr(config, "model_type", None)
    why = _unsupported_kind(config)
    if why is None and name not in FAMILIES:
        why = "a new family is one entry in selfspec/target/families.py"
    if why is not None:
        raise UserError(f"model type {name!r} is not supported: {why}. Supported are: {', '.join(sorted(FAMILIES))}.")
    family = FAMILIES[str(name)]
    for reason, applies in family.refused.items():
        if applies(config):
            raise UserError(f"this {name!r} model is not supported, because of {reason}.")
    return family


def _unsupported_kind(config: Any) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder, and selfspec decodes decoder-only models"
    if config.get_text_config() is not config or hasattr(config, "vision_config"):
        return "it is multimodal, and selfspec decodes text; wrap a text-only causal LM"
    layer_types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    strange = sorted(set(layer_types) - {FULL, SLIDING})
    if any(hasattr(config, name) for name in RECURRENT_FIELDS) or any(
        kind == "linear_attention" or "attention" not in kind for kind in strange
    ):
        return "its layers keep a recurrent state, which cannot be rolled back when drafts are rejected"
    if strange:
        return f"its layers are of types {', '.join(map(repr, strange))}, and the cache serves full and sliding ones"
    return None


def max_positions(config: Any) -> int:
    """The longest sequence (prompt and output, in tokens) a model is decoded at."""
    if not length_dependent(config):
        return config.max_position_embeddings
    given = [table.get("original_max_position_embeddings") for table in _rope_tables(config)]
    return min([config.max_position_embeddings, *(length for length in given if length)])


def length_dependent(config: Any) -> bool:
    """Whether the rotary table changes with the length of the sequence; then only its first version is used."""
    return any(table.get("rope_type") in LENGTH_DEPENDENT_ROPE for table in _rope_tables(config))


def _rope_tables(config: Any) -> list[Mapping[str, Any]]:
    """The rotary parameters: one set, or one per layer type."""
    given = getattr(config, "rope_parameters", None) or {}
    nested = [table for table in given.values() if isinstance(table, Mapping)]
    return nested or [given]
