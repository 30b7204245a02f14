"""A LayerSkip model on disk: a LoRA adapter as `peft` reads it, or a whole model as transformers does.

Beside the weights lies what selfspec needs to know, in config.json: `kind`, `exit_layer`, and whose weights are meant,
`base` (before) and `target` (after), and `d_vocab`, with the ids in a file beside it. In a whole model's folder these
keys stand among transformers' own.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from selfspec.drafters.layerskip import DRAFT_VOCAB
from selfspec.target import Target
from selfspec.target.adapters import CONFIG, WEIGHTS, merge_adapter
from selfspec.target.identity import fingerprint
from selfspec.training.data import write_atomically
from selfspec.training.identity import target_identity
from selfspec.training.layerskip_stack import SkipStack


def save_layerskip(
    stack: SkipStack, target: Target, folder: Path, exit_layer: int, exits: list[int], token_ids: Tensor | None
) -> None:
    base = {name: value for name, value in target_identity(target).items() if name != "template"}
    shape = {name: base[name] for name in ("vocab_size", "num_layers", "width")}
    facts: dict[str, Any] = {"kind": "layerskip", "exit_layer": exit_layer, "exits": exits, "base": base}
    if hasattr(stack.model, "peft_config"):
        _save_adapter(stack.model, folder, target.name)
        merged = copy.deepcopy(target.hf_model).float()
        merge_adapter(merged, folder)
        written: dict[str, Any] = {}
    else:
        merged = copy.deepcopy(stack.model).to(torch.bfloat16)
        merged.config._attn_implementation_internal = target.hf_model.config._attn_implementation
        merged.config.dtype = torch.bfloat16
        merged.save_pretrained(folder)
        if target.tokenizer is not None:
            target.tokenizer.save_pretrained(folder)
        written = json.loads((folder / "config.json").read_text())
    facts["target"] = {"name": f"{target.name}-layerskip", **shape, "fingerprint": fingerprint(merged, **shape)}
    facts["d_vocab"] = None if token_ids is None else len(token_ids)
    if token_ids is not None:
        write_atomically(folder / DRAFT_VOCAB, lambda partial: save_file({"token_ids": token_ids.cpu()}, partial))
    _write(folder / "config.json", written | facts)


def _save_adapter(model: Any, folder: Path, base_name: str) -> None:
    from peft import get_peft_model_state_dict

    weights = {name: t.to("cpu", torch.bfloat16).contiguous() for name, t in get_peft_model_state_dict(model).items()}
    write_atomically(folder / WEIGHTS, lambda partial: save_file(weights, partial, metadata={"format": "pt"}))
    given = model.peft_config["default"].to_dict() | {"base_model_name_or_path": base_name, "inference_mode": True}
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in given.items()}
    _write(folder / CONFIG, plain)


def _write(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    write_atomically(path, lambda partial: partial.write_text(text))
