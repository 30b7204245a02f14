"""How large the parts of a model are, from its configuration alone: no weights are read, none are made.

transformers builds the model on torch's meta device, where tensors have shapes and no contents, so that every supported
family counts right. Cost: seconds for the largest models, no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from selfspec.config import TargetConfig
from selfspec.errors import UserError
from selfspec.target.families import family_of
from selfspec.target.loading import random_model

EXPERTS = ".experts."
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
SMOLLM2 = dict(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
    tie_word_embeddings=True,
)


@dataclass(frozen=True)
class ModelShape:
    """A model as what a pass over it reads and computes. Parameters are per layer, on average over the layers."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    layer_params: float  # without routed experts
    head_params: float
    expert_params: float = 0.0  # of all routed experts together
    num_experts: int = 0
    experts_per_token: int = 0
    tied: bool = False  # the head is the embedding


def shape_of(config: TargetConfig) -> ModelShape:
    """The shape of what a conf/target file names. Raises UserError for a folder without a usable config.json."""
    with torch.device("meta"):
        return shape_of_model(_empty_model(config))


def _empty_model(config: TargetConfig) -> Any:
    if config.kind == "gguf":
        raise UserError("a GGUF file has no config.json; give its original as target=hf target.path=<folder>.")
    if config.kind == "random":
        return random_model(config)
    if config.kind == "smollm2":
        llama: Any = CONFIG_MAPPING["llama"]
        return AutoModelForCausalLM.from_config(llama(**SMOLLM2))
    path = Path(str(config.path)).expanduser()
    try:
        hf_config = AutoConfig.from_pretrained(str(path if path.exists() else config.path), revision=config.revision)
    except (OSError, ValueError, KeyError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(
            f"No model configuration at {config.path}: {reason} Needed: a folder with config.json."
        ) from error
    return AutoModelForCausalLM.from_config(hf_config)


def shape_of_model(model: Any) -> ModelShape:
    """The shape of a transformers model, with or without contents."""
    config = model.config
    family = family_of(config)
    layers = list(attrgetter(family.layers)(model))
    experts = sum(_numel(layer, experts=True) for layer in layers)
    num_kv_heads, head_dim = family.heads(config)
    num_experts = next((int(found) for name in NUM_EXPERTS if (found := getattr(config, name, None))), 0)
    return ModelShape(
        num_layers=len(layers),
        width=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        layer_params=(sum(map(_numel, layers)) - experts) / len(layers),
        head_params=float(_numel(attrgetter(family.head)(model))),
        expert_params=experts / len(layers),
        num_experts=num_experts if experts else 0,
        experts_per_token=int(config.num_experts_per_tok) if experts else 0,
        tied=bool(getattr(config, "tie_word_embeddings", False)),
    )


def _numel(module: nn.Module, experts: bool = False) -> int:
    """Parameters of a module; only those of its routed experts, or all."""
    return sum(
        parameter.numel() for name, parameter in module.named_parameters() if not experts or EXPERTS in f".{name}."
    )
