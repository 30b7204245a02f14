"""top-k, top-p and min-p, token for token as transformers' warpers, ties included.

Sources: `TopKLogitsWarper`, `TopPLogitsWarper`, `MinPLogitsWarper` of transformers 5.24 with one token kept at least.
Each maps logits [..., V] to logits [..., V] with removed tokens at -inf; NaN and +inf survive, to be reported later.
Cost: top-p sorts the vocabulary (the dearest transform by far), the other two are a few passes over it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def top_k(scores: Tensor, k: int) -> Tensor:
    """Remove tokens below the k-th largest logit; ties with it stay."""
    kth = torch.topk(scores, min(k, scores.shape[-1]), dim=-1).values[..., -1:]
    return scores.masked_fill(scores < kth, -torch.inf)


def top_p(scores: Tensor, p: float) -> Tensor:
    """Remove the least likely tokens whose probabilities sum to at most 1 - p; the most likely one always stays."""
    ascending, order = torch.sort(scores, dim=-1, descending=False)
    remove = ascending.softmax(dim=-1).cumsum(dim=-1) <= (1 - p)
    remove[..., -1] = False
    return scores.masked_fill(torch.zeros_like(remove).scatter(-1, order, remove), -torch.inf)


def min_p(scores: Tensor, p: float) -> Tensor:
    """Remove tokens less likely than p times the most likely one."""
    probabilities = scores.softmax(dim=-1)
    return scores.masked_fill(probabilities < p * probabilities.amax(dim=-1, keepdim=True), -torch.inf)
