"""Reading a trained draft: `config.json` and `model.safetensors`, checked against the target and against themselves.

A draft that does not fit would not fail: it would draft badly, and look like a bad method. So every mismatch is an
error: another target's fingerprint, width or vocabulary, a missing weight, a weight nobody reads, a wrong shape.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from selfspec.errors import UserError
from selfspec.target import Target


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    config: dict[str, Any]
    weights: dict[str, Tensor]
    token_ids: Tensor | None  # the reduced draft vocabulary, int64; None: all tokens


def read_checkpoint(path: str | Path, kind: str, target: Target) -> Checkpoint:
    """A draft of `kind` trained for `target`, on the target's device and in its dtype. UserError for anything else."""
    folder = Path(path).expanduser()
    try:
        config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors", device=str(target.device))
    except (OSError, json.JSONDecodeError, SafetensorError) as error:
        raise UserError(
            f"{folder} is not a trained draft: {error}. A draft is a folder with config.json and model.safetensors, "
            "made by experiments/train.py."
        ) from error
    if config.get("kind") != kind:
        raise UserError(f"{folder} holds a draft of kind {config.get('kind')!r}, not {kind!r}.")
    made_for = config.get("target", {})
    ours = {
        "fingerprint": target.fingerprint,
        "vocab_size": target.vocab_size,
        "num_layers": target.num_layers,
        "width": target.width,
    }
    for what in ("vocab_size", "num_layers", "width", "fingerprint"):  # the plainest difference first
        if made_for.get(what) != ours[what]:
            raise UserError(
                f"The draft in {folder} was trained for target {made_for.get('name')!r} with {what} "
                f"{made_for.get(what)}; {target.name!r} has {ours[what]}. Load the target it was trained for, or train "
                "a draft for this one (experiments/train.py)."
            )
    token_ids = weights.pop("token_ids", None)
    if (token_ids is None) != (config.get("d_vocab") is None) or (
        token_ids is not None and len(token_ids) != config["d_vocab"]
    ):
        raise UserError(
            f"{folder}: config.json says d_vocab={config.get('d_vocab')}, model.safetensors holds "
            f"{'no' if token_ids is None else len(token_ids)} token_ids."
        )
    if token_ids is not None and not bool(((token_ids >= 0) & (token_ids < target.vocab_size)).all()):
        raise UserError(f"{folder}: token_ids must lie between 0 and {target.vocab_size - 1}.")
    return Checkpoint(folder, config, {name: tensor.to(target.dtype) for name, tensor in weights.items()}, token_ids)


def load_into(module: nn.Module, checkpoint: Checkpoint) -> nn.Module:
    """`module` with the checkpoint's weights, all of them and no others, in their dtype. UserError otherwise."""
    wanted, found = module.state_dict(), checkpoint.weights
    if missing := sorted(set(wanted) - set(found)):
        raise UserError(f"{checkpoint.folder}/model.safetensors lacks {missing[0]} ({len(missing)} missing in all).")
    if unused := sorted(set(found) - set(wanted)):
        raise UserError(
            f"{checkpoint.folder}/model.safetensors holds {unused[0]}, which this draft has no use for "
            f"({len(unused)} such in all)."
        )
    for name, tensor in found.items():
        if tensor.shape != wanted[name].shape:
            raise UserError(
                f"{checkpoint.folder}/model.safetensors: {name} has shape {tuple(tensor.shape)}, expected "
                f"{tuple(wanted[name].shape)}."
            )
    module.load_state_dict(found, assign=True)
    return module.requires_grad_(False).eval()
