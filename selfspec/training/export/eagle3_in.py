"""Published EAGLE-3 drafts as ours: the `speculators` folder and the flat layout of EAGLE, SpecForge and SGLang.

What decides between a good draft and a silently useless one is not in the weights: which layers the features come from,
and four flags about norms. Each is read, and what our head does not do is refused by name:

- layers: `eagle_aux_hidden_state_layer_ids` at the top level counts the state entering a layer, as ours;
  `eagle_config`'s counts the one leaving it, so ours plus one; without either it is (2, L/2, L−3), entering;
- norm_before_residual: `speculators` and vLLM disagree on its default, so a nested configuration must say it; the flat
  layout means false where it is silent;
- vocabulary: draft token i is target token i + d2t[i]; `t2d`, if there, has to say the same.

An embedding of its own is accepted where it equals the target's (checkpoints often carry a copy).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from selfspec.drafters.eagle3_head import Eagle3Head, HeadShape
from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.training.export.eagle3_out import check_embedding
from selfspec.training.export.folders import Folder, check_tensors

NOT_OURS = {  # flag -> what our head does instead
    "norm_before_fc": "joins the features as they are",
    "fc_norm": "joins the features as they are",
    "norm_output": "feeds back the layer's output before the norm",
    "tie_word_embeddings": "has a head of its own",
    "attention_bias": "has no biases",
    "mlp_bias": "has no biases",
}


def is_eagle3(source: Folder) -> bool:
    config = source.config
    return (
        "speculators_model_type" in config
        or "LlamaForCausalLMEagle3" in (config.get("architectures") or [])
        or "midlayer.hidden_norm.weight" in source.tensors
    )


def import_eagle3(
    source: Folder, target: Target, feature_layers: list[int] | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Our config.json (all but the target) and tensors, in the source's dtype.

    `feature_layers`, counted as ours (entering), overrides what the folder says.
    UserError: a flag our head does not follow, another vocabulary or width, missing or unread weights.
    """
    nested = "speculators_model_type" in source.config
    if nested and source.config["speculators_model_type"] != "eagle3":
        raise _error(
            source, f"speculators_model_type is {source.config['speculators_model_type']!r}; eagle3 is read here"
        )
    layer = source.config.get("transformer_layer_config") if nested else source.config
    if not isinstance(layer, dict):
        raise _error(source, "transformer_layer_config is missing")
    _check_flags(source, layer, nested)
    check_embedding(target)
    tensors = {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in source.tensors.items()}
    if len(tensors) < len(source.tensors):
        raise _error(source, "it holds both midlayer.* and layers.0.*")
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    embedding = tensors.pop("embed_tokens.weight", None)
    shape = _shape(source, layer, target, tensors)
    with torch.device("meta"):
        check_tensors(source.path, tensors, Eagle3Head(shape).state_dict())
    _check_embedding_copy(source, target, embedding)
    token_ids = _token_ids(source, d2t, t2d, shape.d_vocab, target)
    if token_ids is not None:
        tensors["token_ids"] = token_ids
    config = {
        "kind": "eagle3",
        "feature_layers": _feature_layers(source, target, feature_layers),
        "shape": asdict(shape),
        "num_steps": _num_steps(source),
        "d_vocab": None if token_ids is None else len(token_ids),
    }
    return config, tensors


def _error(source: Folder, problem: str) -> UserError:
    return UserError(f"{source.path} cannot be read as an EAGLE-3 draft: {problem}.")


def _check_flags(source: Folder, layer: dict[str, Any], nested: bool) -> None:
    if nested and "norm_before_residual" not in source.config:
        raise _error(
            source,
            "config.json does not say norm_before_residual, whose default is not the same everywhere. Ask its authors, "
            "and add it",
        )
    for flag, instead in NOT_OURS.items():
        if source.config.get(flag) or layer.get(flag):
            raise _error(source, f"{flag} is true; our head {instead}")
    for key, allowed in (("model_type", ("llama",)), ("hidden_act", ("silu",)), ("num_hidden_layers", (1,))):
        if layer.get(key, allowed[0]) not in allowed:
            raise _error(source, f"{key} is {layer[key]!r}; our head is one Llama layer ({key}={allowed[0]!r})")
    rope = _rope(layer)
    if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        raise _error(source, f"its rotary embedding is scaled ({kind}); our head turns by rope_theta alone")
    if layer.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise _error(source, "its rotary embedding turns part of a head; ours turns all of it")
    if "sliding_attention" in (layer.get("layer_types") or []):
        raise _error(source, "its attention slides; our head sees everything")


def _rope(layer: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 keeps theta and scaling in rope_parameters; before that, rope_scaling held the scaling alone."""
    return {**(layer.get("rope_scaling") or {}), **(layer.get("rope_parameters") or {})}


def _shape(source: Folder, layer: dict[str, Any], target: Target, tensors: dict[str, Tensor]) -> HeadShape:
    width, vocab = layer.get("hidden_size"), layer.get("vocab_size")
    if width != target.width or source.config.get("target_hidden_size") not in (None, target.width):
        raise _error(
            source,
            f"its width is {width} (target_hidden_size {source.config.get('target_hidden_size')}), that of "
            f"{target.name} is {target.width}",
        )
    if vocab != target.vocab_size:
        raise _error(source, f"it is for a vocabulary of {vocab} tokens, {target.name} has {target.vocab_size}")
    if "lm_head.weight" not in tensors:
        raise _error(source, "lm_head.weight is missing: our head does not share the target's")
    rows = tensors["lm_head.weight"].shape[0]
    said = source.config.get("draft_vocab_size", rows)
    if said != rows:
        raise _error(source, f"draft_vocab_size is {said}, lm_head.weight has {rows} rows")
    try:
        heads = int(layer["num_attention_heads"])
        return HeadShape(
            width=width,
            intermediate_size=int(layer["intermediate_size"]),
            num_heads=heads,
            num_kv_heads=int(layer.get("num_key_value_heads") or heads),
            head_dim=int(layer.get("head_dim") or width // heads),
            rope_theta=float(_rope(layer).get("rope_theta", layer.get("rope_theta", 10000.0))),
            norm_eps=float(layer["rms_norm_eps"]),
            d_vocab=rows,
            norm_before_residual=bool(source.config.get("norm_before_residual", False)),
        )
    except KeyError as error:
        raise _error(source, f"config.json does not say {error.args[0]}") from error


def _token_ids(source: Folder, d2t: Tensor | None, t2d: Tensor | None, d_vocab: int, target: Target) -> Tensor | None:
    if d2t is None:
        if d_vocab != target.vocab_size:
            raise _error(
                source, f"it drafts {d_vocab} of {target.vocab_size} tokens, but d2t, which says which, is missing"
            )
        return None
    if d2t.shape != (d_vocab,) or d2t.is_floating_point():
        raise _error(source, f"d2t must be {d_vocab} whole numbers, it is {list(d2t.shape)} {d2t.dtype}")
    ids = torch.arange(d_vocab) + d2t.long()
    if not (int(ids.min()) >= 0 and int(ids.max()) < target.vocab_size and len(ids.unique()) == d_vocab):
        raise _error(source, f"d2t does not lead to {d_vocab} distinct tokens of {target.vocab_size}; it holds offsets")
    if t2d is not None:
        marked = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        if t2d.shape != marked.shape or not torch.equal(t2d.bool(), marked):
            raise _error(source, "d2t and t2d name different tokens")
    return None if torch.equal(ids, torch.arange(target.vocab_size)) else ids


def _check_embedding_copy(source: Folder, target: Target, embedding_VM: Tensor | None) -> None:
    if embedding_VM is None:
        return
    own_VM = target.hf_model.get_input_embeddings().weight.detach().cpu()
    dtype = min(embedding_VM.dtype, own_VM.dtype, key=lambda dtype: torch.finfo(dtype).bits)
    if embedding_VM.shape != own_VM.shape or not torch.equal(embedding_VM.to(dtype), own_VM.to(dtype)):
        raise _error(source, f"embed_tokens.weight is not the embedding of {target.name}, which is what our head reads")


def _feature_layers(source: Folder, target: Target, given: list[int] | None) -> list[int]:
    config, num_layers = source.config, target.num_layers
    entering = config.get("eagle_aux_hidden_state_layer_ids")
    leaving = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if given is None and entering and leaving and list(entering) != [layer + 1 for layer in leaving]:
        raise _error(
            source,
            f"it names layers {entering} (entering) and, in eagle_config, {leaving} (leaving), which are not the same. "
            "Say which are meant with feature_layers=[...], counting the states entering layers",
        )
    if given is None and entering:
        given = list(entering)
    elif given is None and leaving:
        given = [layer + 1 for layer in leaving]
    layers = given if given is not None else [2, num_layers // 2, num_layers - 3]
    if len(layers) != 3 or not all(0 <= layer <= num_layers for layer in layers):
        raise _error(source, f"its features enter layers {layers}; needed are three from 0 to {num_layers}")
    return layers


def _num_steps(source: Folder) -> int:
    """How many tokens it was trained to draft in a row, where that is said; else EAGLE-3's own seven."""
    methods = (source.config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return int(methods[0].get("speculative_tokens", 7))
