"""alpha = sum_v min(p, q): the probability that one draft is accepted by rejection, measured without its noise.

Leviathan et al. 2023, Theorem 3.5. Averaged over the positions that were really tested it estimates acceptance with far
less variance than accepted/drafted, and it is not the same number: untested drafts do not count.
Cost: two passes over [B, K, V], beside the softmax of p.
"""

from __future__ import annotations

import torch
from torch import Tensor


def alpha(
    drafted_BK: Tensor, q_BKV: Tensor | None, num_drafted_B: Tensor, num_accepted_B: Tensor, p_BTV: Tensor
) -> tuple[Tensor, Tensor]:
    """Sum [B] float64 of alpha over the tested positions, and their number [B]. q None: certain drafts, alpha = p(x).

    p is what the drafts were tested against (`probabilities(logits)`; one-hot at temperature 0).
    """
    K = drafted_BK.shape[1]
    k = torch.arange(K, device=drafted_BK.device)
    tested_BK = (k <= num_accepted_B[:, None]) & (k < num_drafted_B[:, None])
    if q_BKV is None:
        x_BK1 = drafted_BK.clamp(0, p_BTV.shape[-1] - 1)[..., None]
        overlap_BK = p_BTV[:, :K].gather(-1, x_BK1)[..., 0]
    else:
        overlap_BK = torch.minimum(p_BTV[:, :K], q_BKV).sum(dim=-1)
    return torch.where(tested_BK, overlap_BK, 0).double().sum(dim=1), tested_BK.sum(dim=1)
