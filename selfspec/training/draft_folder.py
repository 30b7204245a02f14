"""How a trained draft is written: `model.safetensors`, then `config.json`, which makes the folder a draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from selfspec.target import Target
from selfspec.training.data import write_atomically
from selfspec.training.identity import target_identity


def write_draft(
    folder: Path, config: dict[str, Any], module: nn.Module, token_ids: Tensor | None, target: Target
) -> None:
    """The weights of `module` in bfloat16, its reduced draft vocabulary, and `config` (with its `kind`), completed by
    what every draft says of vocabulary and target. `selfspec.drafters.checkpoint` reads it.
    """
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in module.state_dict().items()}
    if token_ids is not None:
        weights["token_ids"] = token_ids
    whole = {
        **config,
        "d_vocab": None if token_ids is None else len(token_ids),
        "target": {k: v for k, v in target_identity(target).items() if k != "template"},
    }
    text = json.dumps(whole, indent=2, sort_keys=True) + "\n"
    write_atomically(folder / "model.safetensors", lambda partial: save_file(weights, partial))
    write_atomically(folder / "config.json", lambda partial: partial.write_text(text))
