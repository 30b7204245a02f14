"""A smaller draft that begins with a larger one of its kind: what it can take over of the larger one's weights.

- feed_forward=false: all but the feed-forward part.
- a smaller intermediate_size: of the feed-forward part, the neurons that can add most to the residual.
- own_head=false, of a draft that then maps (eagle3): the map through which the target's output matrix comes closest
  to the larger draft's own, by least squares over the draft vocabulary.

Each is a beginning, worth less than the larger draft until it is trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.training.packed import reduced_head

ENTRIES = ("intermediate_size", "own_head", "feed_forward")  # of config.json, that say how large a draft is


def shrinks(name: str, theirs: Any, ours: Any) -> bool:
    """Whether a draft with `ours` for this entry of config.json is smaller than one that has `theirs`."""
    if name == "intermediate_size":
        return isinstance(theirs, int) and isinstance(ours, int) and ours < theirs
    return name in ENTRIES and ours is False and theirs is not False


def made_smaller(
    weights: Mapping[str, Tensor], token_ids: Tensor | None, ours: Mapping[str, Tensor], target: Target
) -> dict[str, Tensor]:
    """The larger draft's weights with the names and shapes of `ours`, but for its draft vocabulary `token_ids`. What
    cannot be made so stays as it is. UserError: numbers that are not finite.
    """
    made = dict(weights)
    if "head_map.weight" in ours and "lm_head.weight" in made:
        through_VM = reduced_head(target, token_ids)[0].detach().float().cpu()
        if made["lm_head.weight"].shape == through_VM.shape:
            made["head_map.weight"] = _head_map(made.pop("lm_head.weight").float().cpu(), through_VM, token_ids)
    if not any(_feeds(name, target) for name in ours):
        made = {name: weight for name, weight in made.items() if not _feeds(name, target)}
    for down in [name for name in made if name.endswith("mlp.down_proj.weight") and name in ours]:
        made |= _narrowed(made, down, ours[down].shape[1])
    return made


def _feeds(name: str, target: Target) -> bool:
    """Whether a weight of this name is of a layer's feed-forward part."""
    return not set(target.family.mlp_parts).isdisjoint(name.split("."))


def _narrowed(weights: Mapping[str, Tensor], down: str, num_kept: int) -> dict[str, Tensor]:
    """The three matrices of a feed-forward part with so many of its neurons; {} where it has no more, or is damaged."""
    names = [down.replace("down_proj", name) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(name in weights for name in names):
        return {}
    gate_IM, up_IM, down_IM = weights[names[0]], weights[names[1]], weights[down].T
    if not gate_IM.shape == up_IM.shape == down_IM.shape or num_kept >= len(gate_IM):
        return {}
    reach_I = gate_IM.float().norm(dim=1) * up_IM.float().norm(dim=1) * down_IM.float().norm(dim=1)
    kept = reach_I.topk(num_kept).indices.sort().values
    return dict(zip(names, (gate_IM[kept], up_IM[kept], down_IM[kept].T), strict=True))


def _head_map(head_VM: Tensor, through_VM: Tensor, token_ids: Tensor | None) -> Tensor:
    """`[M, M]`: the target's rows `through_VM` behind it stand in for `head_VM`. Where a draft vocabulary is in the
    order of its tokens' use (it is when made by make_data.py), they count by rank, as words do in text (Zipf 1949).
    """
    if not bool(torch.isfinite(head_VM).all()):
        raise UserError("The draft to begin with has an output matrix (lm_head) with numbers that are not finite.")
    ranked = token_ids is not None and not bool((token_ids.diff() > 0).all())
    weight_V1 = (torch.arange(len(head_VM)) + 10.0).rsqrt()[:, None] if ranked else torch.ones(len(head_VM), 1)
    return torch.linalg.lstsq(through_VM * weight_V1, head_VM * weight_V1).solution
