"""A smaller draft that begins with a larger one of its kind: what it can take over of the larger one's weights.

- feed_forward=false: all but the feed-forward part.
- a smaller intermediate_size: of the feed-forward part, the neurons that can add most to the residual.
- own_head=false: the map through which the target's output matrix comes closest to the larger draft's own, by least
  squares over the draft vocabulary.

Each is a beginning, worth less than the larger draft until it is trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from selfspec.target import Target
from selfspec.training.packed import reduced_head


def shrinks(name: str, theirs: Any, ours: Any) -> bool:
    """Whether a draft with `ours` for this entry of config.json can begin with one that has `theirs`."""
    if name == "intermediate_size":
        return isinstance(theirs, int) and isinstance(ours, int) and ours < theirs
    return name in ("own_head", "feed_forward") and ours is False and theirs is not False


def made_smaller(
    weights: Mapping[str, Tensor], token_ids: Tensor | None, ours: Mapping[str, Tensor], target: Target
) -> dict[str, Tensor]:
    """The larger draft's weights with the names and shapes of `ours`, but for its draft vocabulary `token_ids`."""
    made = {name: weight for name, weight in weights.items() if name in ours or name == "lm_head.weight"}
    if "head_map.weight" in ours and "lm_head.weight" in made:
        made["head_map.weight"] = _head_map(made.pop("lm_head.weight"), token_ids, target)
    for down in [name for name in made if name.endswith("mlp.down_proj.weight")]:
        gate, up = (down.replace("down_proj", name) for name in ("gate_proj", "up_proj"))
        if (num_kept := ours[down].shape[1]) < made[down].shape[1]:
            reach = made[gate].float().norm(dim=1) * made[up].float().norm(dim=1) * made[down].float().norm(dim=0)
            kept = reach.topk(num_kept).indices.sort().values
            made |= {gate: made[gate][kept], up: made[up][kept], down: made[down][:, kept]}
    return made


def _head_map(head_VM: Tensor, token_ids: Tensor | None, target: Target) -> Tensor:
    """`[M, M]`: the target's rows behind it stand in for `head_VM`. A draft vocabulary is in the order of its tokens'
    use; they count by rank, as words do in text (Zipf 1949).
    """
    through_VM = reduced_head(target, token_ids)[0].detach().float().cpu()
    weight_V1 = (torch.arange(len(through_VM)) + 10.0).rsqrt()[:, None]
    return torch.linalg.lstsq(through_VM * weight_V1, head_VM.float().cpu() * weight_V1).solution
