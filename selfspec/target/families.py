"""What differs between model families, declared in one place.

A family is where its parts are found and how one of its layers is called; everything else in selfspec is the same for
all. A new family is one entry in `FAMILIES` (and its line in the family table of the tests).
"""

from __future__ import annotations

from dataclasses import dataclass

from selfspec.errors import UserError


@dataclass(frozen=True)
class Family:
    """Attribute paths inside the `...ForCausalLM` object."""

    embed: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    rotary: str = "model.rotary_emb"
    head: str = "lm_head"


FAMILIES: dict[str, Family] = {
    "llama": Family(),  # SmolLM2 is a Llama too
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
}


def family_of(config: object) -> Family:
    """The family of a transformers config, or a `UserError` that names what is supported."""
    model_type = getattr(config, "model_type", None)
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"model type {model_type!r} is an encoder-decoder; selfspec decodes decoder-only models")
    if model_type not in FAMILIES:
        raise UserError(
            f"model type {model_type!r} is not supported; supported are: {', '.join(sorted(FAMILIES))}. "
            "A new family is one entry in selfspec/target/families.py"
        )
    return FAMILIES[model_type]


def layer_windows(config: object, num_layers: int) -> list[int | None]:
    """Per layer, the sliding-window width in tokens, or None for full attention."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        known = {"full_attention", "sliding_attention"}
        if strange := set(layer_types) - known:
            raise UserError(f"layer types {sorted(strange)} are not supported; supported are {sorted(known)}")
        return [window if kind == "sliding_attention" else None for kind in layer_types]
    if window is not None and getattr(config, "use_sliding_window", True):
        return [window] * num_layers
    return [None] * num_layers
