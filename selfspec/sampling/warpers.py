"""top-k, top-p and min-p, token for token as transformers' warpers, ties included.

Sources: `TopKLogitsWarper`, `TopPLogitsWarper`, `MinPLogitsWarper` of transformers 5.24 with one token kept at least.
Each maps logits [..., V] to logits [..., V] with removed tokens at -inf; NaN and +inf survive, to be reported later.
Cost: top-p sorts the vocabulary (values only), the other two are a few passes over it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def top_k(scores: Tensor, k: int) -> Tensor:
    """Remove tokens below the k-th largest logit; ties with it stay."""
    kth = torch.topk(scores, min(k, scores.shape[-1]), dim=-1).values[..., -1:]
    return scores.masked_fill(scores < kth, -torch.inf)


def top_p(scores: Tensor, p: float) -> Tensor:
    """Remove the least likely tokens whose probabilities sum to at most 1 - p; the most likely one always stays.

    Of tokens tied at the boundary those with small ids go first. transformers removes as many of them, but which ones
    is up to an unstable sort; here it is the same on every device and for every batch.
    """
    ascending = _sorted(scores)
    remove = ascending.softmax(dim=-1).cumsum(dim=-1) <= (1 - p)
    remove[..., -1] = False
    num_removed = remove.sum(dim=-1, keepdim=True)
    boundary = ascending.gather(-1, num_removed)  # the smallest logit that stays
    tied = scores == boundary
    num_tied_removed = num_removed - (ascending < boundary).sum(dim=-1, keepdim=True)
    goes = (scores < boundary) | (tied & (tied.cumsum(dim=-1, dtype=torch.int32) <= num_tied_removed))
    return scores.masked_fill(goes, -torch.inf)


def min_p(scores: Tensor, p: float) -> Tensor:
    """Remove tokens less likely than p times the most likely one."""
    probabilities = scores.softmax(dim=-1)
    return scores.masked_fill(probabilities < p * probabilities.amax(dim=-1, keepdim=True), -torch.inf)


def _sorted(scores: Tensor) -> Tensor:
    """Values ascending along the vocabulary, NaN last. On CPU by numpy, whose vectorised sort is ~30 times torch's."""
    if scores.device.type == "cpu":
        return torch.from_numpy(np.sort(scores.detach().numpy(), axis=-1))
    return scores.sort(dim=-1).values
