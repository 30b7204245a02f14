"""Attention over the shared cache without copying grouped keys, registered under its own name in transformers.

The R query heads that share one key/value head are folded into extra query rows, `[B, G, R*T, D]`, so keys and values
are read once and never expanded (`repeat_kv` would read and write R times the cache). The mask always comes from
`selfspec.cache.Pass.mask`, already repeated R times and with the sliding window in it. The registry is the extension
point transformers documents; the model's own `_attn_implementation` is left alone (see `selfspec.target.views`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend
from transformers import AttentionInterface

from selfspec.errors import UserError

IMPLEMENTATION = "selfspec_shared_cache"


def grouped_attention(
    module: torch.nn.Module,
    query_BHTD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_kwargs: object,
) -> tuple[Tensor, None]:
    """softmax(q·kᵀ·scaling + mask)·v for grouped heads -> `[B, T, H, D]`. `attention_mask`: `[B, 1, R*T, S]`.

    With `softcap` the scores are cap·tanh(scores / cap) before the mask (Gemma 2). UserError for attention sinks
    (`s_aux`), which need a term of their own in the softmax.
    """
    if s_aux is not None:
        raise UserError(f"{type(module).__name__} has attention sinks, which the shared cache does not support.")
    rows, num_heads, width, _ = query_BHTD.shape
    folded = fold(query_BHTD, key_BGSD.shape[1])
    if softcap is None:
        out = F.scaled_dot_product_attention(folded, key_BGSD, value_BGSD, attn_mask=attention_mask, scale=scaling)
    else:
        scores = folded @ key_BGSD.transpose(-1, -2) * (folded.shape[-1] ** -0.5 if scaling is None else scaling)
        scores = torch.tanh(scores / softcap) * softcap + attention_mask
        out = torch.softmax(scores, -1, dtype=torch.float32).to(value_BGSD.dtype) @ value_BGSD
    return out.reshape(rows, num_heads, width, -1).transpose(1, 2), None


def fold(query_BHTD: Tensor, num_groups: int) -> Tensor:
    """`[B, H, T, D]` -> `[B, G, R*T, D]`: the query heads of a group become rows of one query."""
    rows, num_heads, width, _ = query_BHTD.shape
    return query_BHTD.reshape(rows, num_groups, num_heads // num_groups * width, -1)


def attention_backends(query_BHTD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, mask: Tensor) -> tuple[str, list[str]]:
    """Which of torch's attention kernels (names of `SDPBackend`) runs on these tensors, and on CUDA all that could."""
    folded = fold(query_BHTD, key_BGSD.shape[1])
    chosen = SDPBackend(torch._fused_sdp_choice(folded, key_BGSD, value_BGSD, attn_mask=mask)).name
    if query_BHTD.device.type != "cuda":
        return chosen, [chosen]
    params = torch.backends.cuda.SDPAParams(folded, key_BGSD, value_BGSD, mask, 0.0, False, False)
    checks = {
        "FLASH_ATTENTION": torch.backends.cuda.can_use_flash_attention,
        "EFFICIENT_ATTENTION": torch.backends.cuda.can_use_efficient_attention,
        "CUDNN_ATTENTION": torch.backends.cuda.can_use_cudnn_attention,
    }
    return chosen, [name for name, usable in checks.items() if usable(params, False)] + ["MATH"]


AttentionInterface.register(IMPLEMENTATION, grouped_attention)
