"""From logits to probabilities, and from weights to one token.

`draw` is an inverse CDF over *integers*: weights are scaled to the largest integers whose sum cannot overflow, so their
running sum is exact. Hence the same token on every device, no bias from rounding in a long sum, and a token of weight
zero has an interval of width zero: it can never come out. Cost: three passes over [B, V], one uniform per row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def probabilities(logits: Tensor) -> Tensor:
    """softmax over the vocabulary in float32 (float64 stays). NaN, +inf or nothing left give NaN."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return torch.softmax(logits, dim=-1, dtype=dtype)


def draw(weights_BV: Tensor, u_B: Tensor) -> Tensor:
    """int64 [B]: one token per row with probability proportional to weights [B, V] >= 0; u [B] float64 in (0, 1).

    Resolution: weights below 2**-(62 - log2 V) of the row's largest count as zero. A row without any positive weight
    gives an arbitrary token: the caller reports it.
    """
    V = weights_BV.shape[-1]
    bits = 62 - (V - 1).bit_length()
    largest_B1 = weights_BV.amax(-1, keepdim=True).double().clamp_min(torch.finfo(torch.float64).tiny)
    # two steps: largest * 2**-bits may be 0
    integers_BV = weights_BV.to(torch.float64, copy=True).div_(largest_B1).mul_(2.0**bits).round_().to(torch.int64)
    cumulative_BV = integers_BV.cumsum(-1)
    total_B = cumulative_BV[:, -1]
    target_B = torch.minimum((u_B.double() * total_B.double()).to(torch.int64), total_B - 1)
    return torch.searchsorted(cumulative_BV, target_B[:, None], right=True)[:, 0].clamp_(0, V - 1)
