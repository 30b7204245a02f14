"""Our EAGLE-3 draft for vLLM, SGLang and `speculators`, every flag written out: their defaults differ.

Two layouts. `speculators`: a nested configuration and tensors named as ours; `midlayer`: a flat Llama configuration and
`midlayer.*`, which SGLang reads (it skips names it does not know, without a word). What both have in common:

- Feature layers. Ours, `speculators` and vLLM count the hidden state *entering* layer i; `eagle_config`, which SGLang
  reads, counts the one *leaving* it, so ours minus one. vLLM sorts the ids: an unsorted list would permute features.
- Draft vocabulary. `d2t` int64 holds offsets (target id = i + d2t[i]) and `t2d` bool marks what can be drafted, so
  draft ids ascend: the head's rows are put in that order. Without a reduced vocabulary both are left out.
- Embedding. It is the target's, and servers share theirs. Only `speculators` gets a copy: its loader (0.9.0) takes the
  target's where the draft's holds NaN, and one that the folder lacks holds whatever memory held before.
- The residual is the features before their norm (in imported drafts it may be the normed ones: norm_before_residual),
  `fc` reads them unnormalised (norm_before_fc, fc_norm: false), and the next step reads the layer's output before the
  last norm (norm_output: false).
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selfspec.drafters.checkpoint import Checkpoint
from selfspec.drafters.eagle3_head import HeadShape, output_matrix, read_eagle3
from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.training.export.folders import new_folder, write_into

SPECULATORS_VERSION = "0.9.0"  # the version whose loader this was checked with
FLAGS = {"norm_before_fc": False, "fc_norm": False, "norm_output": False}


def export_speculators(draft_path: str | Path, target: Target, verifier: str, out: str | Path) -> None:
    """`verifier`: the hub id that serving looks the target up by (a local folder can only be served explicitly).

    UserError: another target's draft, weights that do not fit, feature layers the format cannot say.
    """
    check_verifier(verifier)
    draft, shape = _read(draft_path, target)
    layers = _feature_layers(draft, target, first=0)
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "draft_vocab_size": shape.d_vocab,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": layers,
        "embed_requires_grad": False,
        "norm_before_residual": shape.norm_before_residual,
        **FLAGS,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": draft.config["num_steps"],
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier, "architectures": _architectures(target)},
        },
        "transformer_layer_config": _llama(shape, target),
    }
    with new_folder(out) as folder:
        readme = _readme(draft, target, "speculators", verifier)
        tensors = _tensors(draft, target, "layers.0.")
        tensors["embed_tokens.weight"] = (
            target.hf_model.get_input_embeddings().weight.detach().to("cpu", torch.bfloat16)
        )
        write_into(folder, config, tensors, readme)


def export_midlayer(draft_path: str | Path, target: Target, verifier: str, out: str | Path) -> None:
    """The flat layout. UserError: as `export_speculators`; layer 0, which SGLang cannot count, is refused too."""
    check_verifier(verifier)
    draft, shape = _read(draft_path, target)
    layers = _feature_layers(draft, target, first=1)
    config = {
        **_llama(shape, target),
        "norm_before_residual": shape.norm_before_residual,
        **FLAGS,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": shape.d_vocab,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": layers,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers],
            "use_aux_hidden_state": True,
        },
    }
    with new_folder(out) as folder:
        readme = _readme(draft, target, "midlayer", verifier)
        write_into(folder, config, _tensors(draft, target, "midlayer."), readme)


def check_verifier(verifier: str) -> None:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", verifier) and not Path(verifier).expanduser().is_dir():
        raise UserError(f"verifier={verifier!r} is neither a hub id (owner/name) nor an existing folder.")


def check_embedding(target: Target) -> None:
    """UserError where the target does more to a token than look it up: the formats' readers only look it up."""
    table_VM, ids = target.hf_model.get_input_embeddings().weight, torch.arange(min(8, target.vocab_size))
    with torch.no_grad():
        plain = torch.equal(target.embed(ids.to(target.device)), table_VM[ids.to(target.device)])
    if not plain:
        raise UserError(
            f"{target.name} ({target.config.model_type}) scales its embeddings; what reads this format gives a draft "
            "the plain rows, so the same weights would be another draft."
        )


def _read(path: str | Path, target: Target) -> tuple[Checkpoint, HeadShape]:
    """The draft, its output matrix among its weights also where it is the target's behind a map."""
    assert target.dtype != torch.float16, "the draft is read in the target's dtype, and float16 would not hold it"
    check_embedding(target)
    draft, head = read_eagle3(path, target)
    try:
        int(draft.config["num_steps"])
    except (KeyError, TypeError) as error:
        raise UserError(f"{draft.folder / 'config.json'} is not that of an eagle3 draft: {error!r}.") from error
    weights = head.state_dict() | {"lm_head.weight": output_matrix(head, target, draft.token_ids)}
    weights.pop("head_map.weight", None)  # in the matrix now
    return replace(draft, weights=weights), head.shape


def _feature_layers(draft: Checkpoint, target: Target, first: int) -> list[int]:
    layers = list(draft.config["feature_layers"])
    if len(layers) != 3:
        raise UserError(
            f"{draft.folder} joins features of {len(layers)} layers; what reads this format joins exactly 3."
        )
    if layers != sorted(set(layers)):
        raise UserError(
            f"{draft.folder} reads its features from layers {layers}. What serves this format sorts the list and drops "
            "doubles, so another draft would run: only ascending, distinct layers can be exported. Train one with them."
        )
    if not (first <= layers[0] and layers[-1] < target.num_layers):
        raise UserError(
            f"{draft.folder} reads its features from layers {layers}. Allowed in this format: {first} to "
            f"{target.num_layers - 1} (readers differ on whether {target.num_layers} means before or after the norm)."
        )
    return layers


def _llama(shape: HeadShape, target: Target) -> dict[str, Any]:
    """The draft's one layer as a LlamaConfig: its own head size and no biases, whatever the target's layers have."""
    return {
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "hidden_size": shape.width,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": target.max_positions,
        "initializer_range": 0.02,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": getattr(target.config, "bos_token_id", None),
        "eos_token_id": list(target.eos_token_ids) or None,
        "pad_token_id": None,
    }


def _tensors(draft: Checkpoint, target: Target, layer: str) -> dict[str, Tensor]:
    weights = {name: weight.to("cpu", torch.bfloat16) for name, weight in draft.weights.items()}
    named = {name.replace("layers.0.", layer): weight for name, weight in weights.items()}
    if draft.token_ids is None:
        return named
    token_ids, order = draft.token_ids.cpu().sort()
    named["lm_head.weight"] = named["lm_head.weight"][order]
    if len(token_ids) < target.vocab_size:
        named["d2t"] = token_ids - torch.arange(len(token_ids))
        named["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(0, token_ids, True)
    return named


def _architectures(target: Target) -> list[str]:
    return list(getattr(target.config, "architectures", None) or [type(target.hf_model).__name__])


def _readme(draft: Checkpoint, target: Target, layout: str, verifier: str) -> str:
    made_for = draft.config["target"]
    num_steps = draft.config["num_steps"]
    local = Path(verifier).expanduser().is_dir()
    options = f'{{"model": "<this folder>", "method": "eagle3", "num_speculative_tokens": {num_steps}}}'
    serve = [f"vllm serve {verifier} --speculative-config '{options}'"]
    if layout == "speculators" and not local:
        serve = ["vllm serve <this folder>", "", "or", "", *serve]
    if layout == "midlayer":
        serve += [
            "",
            f"python -m sglang.launch_server --model-path {verifier} --speculative-algorithm EAGLE3 \\",
            f"  --speculative-draft-model-path <this folder> --speculative-num-steps {num_steps} \\",
            f"  --speculative-eagle-topk 1 --speculative-num-draft-tokens {num_steps + 1}",
        ]
    return "\n".join(
        [
            f"# EAGLE-3 draft for {verifier}, {layout} layout",
            "",
            f"Exported from a selfspec draft for {made_for['name']} (fingerprint `{made_for['fingerprint']}`), whose",
            "embedding and tokenizer it uses. Features enter layers "
            f"{', '.join(map(str, draft.config['feature_layers']))} of {target.num_layers}.",
            "",
            "```",
            *serve,
            "```",
        ]
    )
