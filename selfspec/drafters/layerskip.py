"""Draft with a LayerSkip model's trained exit: `early_exit`, on the target that the training made.

LayerSkip (Elhoushi et al. 2024) trains the target itself, so its checkpoint is a target, not a part beside one. This
checks that the target at hand is that one, and exits where it was trained to. Lossless with respect to that target.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfspec.drafters import early_exit
from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.target.adapters import WEIGHTS, adapter_digest, adapter_folder

DRAFT_VOCAB = "draft_vocab.safetensors"  # `token_ids`, where the exits were trained on a reduced vocabulary


@dataclass
class Options:
    """checkpoint: the folder that training wrote. exit_layer, d_vocab, draft_vocab: as for early_exit; None: as the
    folder says.
    """

    checkpoint: str
    exit_layer: int | None = None
    d_vocab: int | None = None
    draft_vocab: str | None = None


def build(target: Target, options: Options) -> early_exit.EarlyExit:
    """UserError: no LayerSkip folder, or one that belongs to another target, naming the right one."""
    folder = adapter_folder(options.checkpoint)
    config = _read_config(folder)
    _check_target(folder, config, target)
    exit_layer = options.exit_layer or int(config["exit_layer"])
    d_vocab, draft_vocab = options.d_vocab or config.get("d_vocab"), options.draft_vocab
    if draft_vocab is None and config.get("d_vocab") is not None:
        draft_vocab = str(folder / DRAFT_VOCAB)
    return early_exit.build(target, early_exit.Options(exit_layer, d_vocab, draft_vocab))


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"{folder} is not a LayerSkip model: {error}. Train one: experiments/train.py.") from error
    if config.get("kind") != "layerskip" or not {"exit_layer", "base", "target"} <= set(config):
        raise UserError(f"{folder}/config.json is of kind {config.get('kind')!r}, not a whole 'layerskip' one.")
    return config


def _check_target(folder: Path, config: dict[str, Any], target: Target) -> None:
    """The weights are the ones trained: by fingerprint, or by the adapter that was merged into them."""
    is_adapter = (folder / WEIGHTS).is_file()
    merged = getattr(target.config, "adapter_sha256", None)
    if target.fingerprint == config["target"]["fingerprint"] or (is_adapter and merged == adapter_digest(folder)):
        return
    base = config["base"]
    if is_adapter:
        right = (
            f"load_target({base['name']!r}, adapter={str(folder)!r}), or target={base['name']} target.adapter={folder}"
        )
    else:
        right = f"load_target({str(folder)!r}), or target=hf target.path={folder}"
    what = "its base model, not trained for drafting" if target.fingerprint == base["fingerprint"] else "another model"
    raise UserError(
        f"{folder} drafts for the LayerSkip model in it, and {target.name!r} is {what} (fingerprint "
        f"{target.fingerprint}, needed {config['target']['fingerprint']}). The right target: {right}."
    )
