"""argmax and top-k over a vocabulary without torch's on the CPU, which are many times slower than its amax, most of all
in bfloat16.

The largest value per block first, then the block, then the place inside it: the same index as `torch.argmax`, the
smallest one on ties; NaN counts as the largest. On other devices, and for small vocabularies, torch's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
SMALL = 4096


def first_argmax(scores: Tensor) -> Tensor:
    """int64 `[...]`: index of the first largest entry of scores `[..., V]`."""
    V = scores.shape[-1]
    if V < SMALL or scores.device.type != "cpu":
        return scores.argmax(dim=-1)
    if V % BLOCK:
        scores = torch.nn.functional.pad(scores, (0, BLOCK - V % BLOCK), value=-torch.inf)
    blocks = scores.reshape(*scores.shape[:-1], -1, BLOCK)
    which = blocks.amax(dim=-1).argmax(dim=-1, keepdim=True)
    inside = blocks.gather(-2, which[..., None].expand(*which.shape, BLOCK))[..., 0, :]
    return which[..., 0] * BLOCK + inside.argmax(dim=-1)


def best_few(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest entries of scores `[..., V]`, largest first, and their indices int64, as `torch.topk`; any of
    equal ones. Where there are fewer than `count`, −inf stands for the rest.
    """
    V = scores.shape[-1]
    if count > V:
        values, indices = best_few(torch.nn.functional.pad(scores, (0, count - V), value=-torch.inf), count)
        return values, indices.clamp_(max=V - 1)
    if V < SMALL or scores.device.type != "cpu" or count >= V // BLOCK:
        best = scores.topk(count, dim=-1)
        return best.values, best.indices
    if V % BLOCK:
        scores = torch.nn.functional.pad(scores, (0, BLOCK - V % BLOCK), value=-torch.inf)
    blocks = scores.reshape(*scores.shape[:-1], -1, BLOCK)
    which = blocks.amax(dim=-1).topk(count, dim=-1).indices  # the best of all lie in these blocks
    inside = blocks.gather(-2, which[..., None].expand(*which.shape, BLOCK)).flatten(-2)
    best = inside.topk(count, dim=-1)
    found = which.gather(-1, best.indices // BLOCK) * BLOCK + best.indices % BLOCK
    return best.values, found.clamp_(max=V - 1)  # where all is −inf, the padding is as good as any
