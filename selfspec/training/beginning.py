"""Going on from a trained draft: its weights as the beginning of another run, on other text, say.

The draft must be of the same kind, target and make (feature layers, exit, heads, sizes), or a larger one
(`selfspec.training.smaller`). Its draft vocabulary may be another one: rows of tokens that both have are taken over,
the others begin as in a fresh run.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from selfspec.drafters.checkpoint import read_checkpoint
from selfspec.drafters.independent import read_token_ids
from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.training.smaller import ENTRIES, made_smaller, shrinks
from selfspec.training.trainee import Trainee

VOCABULARY_ROWS = ("lm_head.", "model.embed_tokens.")  # what weights with a row per token begin with
MAY_DIFFER = ("d_vocab", "num_steps", "target")  # of config.json; read_checkpoint compares the targets


def begin_with(trainee: Trainee, kind: str, path: str | Path, target: Target) -> str:
    """Put the draft's weights into the trainee; returns the sha256 of its file. UserError: no draft there, one of
    another kind, target or make.
    """
    folder = Path(path).expanduser()
    weights, token_ids = _read(folder, kind, target)
    ours: dict[str, Tensor] = trainee.module.state_dict()
    if _larger(trainee, kind, folder):
        weights = made_smaller(weights, token_ids, ours, target)
    if "lm_head.weight" in ours and "lm_head.weight" not in weights:  # tied, and written once
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    if set(weights) != set(ours):
        differing = sorted(set(weights) ^ set(ours))
        raise UserError(
            f"train.begin_with={folder} holds other weights than this draft has, for example {differing[0]}."
        )
    our_ids: Tensor | None = getattr(trainee, "token_ids", None)
    with torch.no_grad():
        for name, tensor in ours.items():
            rows = weights[name].to(tensor)
            if name.startswith(VOCABULARY_ROWS) and not _equal(our_ids, token_ids):
                rows = _same_tokens(tensor, our_ids, rows, token_ids)
            if rows.shape != tensor.shape:
                raise UserError(
                    f"train.begin_with={folder}: {name} has shape {tuple(rows.shape)}, this draft's has "
                    f"{tuple(tensor.shape)}. Give the options that the draft was trained with."
                )
            tensor.copy_(rows)
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def _read(folder: Path, kind: str, target: Target) -> tuple[dict[str, Tensor], Tensor | None]:
    if kind != "independent":
        checkpoint = read_checkpoint(folder, kind, target)
        return dict(checkpoint.weights), checkpoint.token_ids
    try:
        weights = load_file(folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise UserError(f"train.begin_with={folder} is not a trained draft: {error}.") from error
    return weights, read_token_ids(folder, target)


def _larger(trainee: Trainee, kind: str, folder: Path) -> bool:
    """Whether the draft there is a larger one, by what both would write into config.json. UserError where they differ
    otherwise, apart from MAY_DIFFER.
    """
    if kind == "independent":
        return False  # its shapes say it all
    with tempfile.TemporaryDirectory() as aside:
        trainee.save(Path(aside))
        ours, theirs = (json.loads((at / "config.json").read_text()) for at in (Path(aside), folder))
    here, there = _flat(ours), _flat(theirs)
    smaller = {name for name, value in here.items() if shrinks(name, there.get(name), value)}
    for name, value in there.items():  # what an older draft does not say yet had no other value
        if name not in (*MAY_DIFFER, *smaller) and here.get(name) != value:
            smaller_ones = ", or those of a smaller draft" if name in ENTRIES else ""
            raise UserError(
                f"train.begin_with={folder} was trained with {name}={value!r}, this draft has {here.get(name)!r}. Give "
                f"the same options{smaller_ones}."
            )
    return bool(smaller)


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """With the entries of `shape` beside the others."""
    return {**{name: value for name, value in config.items() if name != "shape"}, **config.get("shape", {})}


def _equal(ours: Tensor | None, theirs: Tensor | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return torch.equal(ours.cpu(), theirs.cpu())


def _same_tokens(begun: Tensor, our_ids: Tensor | None, rows: Tensor, their_ids: Tensor | None) -> Tensor:
    """`begun` with the rows of those tokens that the other draft had, too, and rows past the vocabulary (the one of all
    other tokens) as they were there.
    """
    ours = torch.arange(len(begun)) if our_ids is None else our_ids.cpu()
    theirs = torch.arange(len(rows)) if their_ids is None else their_ids.cpu()
    place = torch.full((int(max(ours.max(), theirs.max())) + 1,), -1)
    place[theirs] = torch.arange(len(theirs))
    found = place[ours]
    merged = begun.clone()
    merged[: len(ours)][found >= 0] = rows[found[found >= 0]]
    if len(begun) - len(ours) == len(rows) - len(theirs):
        merged[len(ours) :] = rows[len(theirs) :]
    return merged
