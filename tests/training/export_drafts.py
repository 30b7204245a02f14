"""Small targets and random EAGLE-3 drafts for the export tests: every weight drawn, so that none may go unnoticed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import tiny_models
from selfspec.target import Target, wrap_target
from selfspec.training.draft_vocab import write_draft_vocab
from selfspec.training.eagle3 import Eagle3Trainee, build_eagle3
from selfspec.training.identity import target_identity

RANKED = [2, 90, 5, 41, 40, 7, 96, 13, 77, 21, 3, 60]  # EOS first, then unsorted, as counts rank them


def small_target(family: str = "llama", **settings: Any) -> Target:
    return wrap_target(tiny_models.tiny_model(family, num_layers=6, **settings), None, "small")


def fill(module: nn.Module, seed: int = 0) -> None:
    """Random weights that bfloat16 holds exactly, norms around one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.dim() == 2 else 0.2)
            parameter.copy_((noise + (parameter.dim() == 1)).bfloat16())


def eagle3_draft(target: Target, folder: Path, d_vocab: int | None = len(RANKED), **options: Any) -> Eagle3Trainee:
    """A random draft for `target`, saved in `folder` as train.py would."""
    folder.mkdir(parents=True)
    if d_vocab is not None:
        counts = np.ones(target.vocab_size)
        ids = np.asarray([*RANKED, *sorted(set(range(target.vocab_size)) - set(RANKED))], dtype=np.int64)
        write_draft_vocab(folder / "vocab.st", ids, counts, target_identity(target)["fingerprint"])
        options |= {"draft_vocab": str(folder / "vocab.st"), "d_vocab": d_vocab}
    trainee = build_eagle3(target, {"feature_layers": (1, 3, 5), **options})
    fill(trainee.module)
    trainee.save(folder)
    (folder / "vocab.st").unlink(missing_ok=True)
    return trainee


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def edit(folder: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], Any]) -> None:
    """Rewrite a checkpoint after `change` has had its way with it."""
    config, tensors = read(folder)
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
