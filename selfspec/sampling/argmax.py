"""argmax over a vocabulary without torch's CPU argmax, which is many times slower than its amax, most of all in
bfloat16.

The largest value per block first, then the block, then the place inside it: the same index as `torch.argmax`, the
smallest one on ties; NaN counts as the largest. On other devices, and for small vocabularies, `torch.argmax` itself.
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
