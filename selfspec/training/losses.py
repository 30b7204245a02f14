"""What a draft is trained on: the target's next-token distribution, kept as its K likeliest tokens and the rest.

Every loss compares p and q on the same coarse cells: each kept token by itself, and all others together. What q does
within that last cell, where the target's own shape is not kept, is left to it. With α = Σ_c min(p_c, q_c):

    ce         − Σ_c p_c log q_c                 its gradient is that of KL(p || q)
    tv         ½ Σ_c |p_c − q_c| = 1 − α         the rejection rate itself; its gradient vanishes where q is far off
    nla        − log α                           the same direction, scaled by 1 / α
    lk_hybrid  λ KL + (1 − λ) TV, λ = exp(−3 α)  KL until drafts are accepted, then TV; λ is held constant

(nla and lk_hybrid: Samarin et al. 2026, arXiv 2602.23881.) `head_loss_named` gives one of them fused with the output
matrix in chunks (as Liger's fused linear cross-entropy does): [N, V] logits never exist at once, which spares the
gigabyte that a CPU would page in anew at every step. By the chain rule through the softmax, with h_c = dL / d log q_c,

    dL/dz_v = h_v − q_v Σ_c h_c  for a kept token,   q_v (h_o / q_o − Σ_c h_c)  for the others (o: their cell)

so a loss is a function of the K + 1 cells alone, differentiated there by autograd.

Shape letters: N supervised positions, K kept tokens, C = K + 1 cells, V vocabulary, M width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from selfspec.config import allowed
from selfspec.errors import UserError

CHUNK = 256  # positions whose logits exist at one time
LEAST_MASS = 1e-6

CellLoss = Callable[[Tensor, Tensor], Tensor]  # (log q, p) by cell `[N, C]` -> L `[N]`
HeadLoss = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor], Tensor
]  # (hidden, head, ids, logp, weight), see head_loss


def cross_entropy(logq_NC: Tensor, p_NC: Tensor) -> Tensor:
    return -(p_NC * logq_NC).sum(-1)


def total_variation(logq_NC: Tensor, p_NC: Tensor) -> Tensor:
    return 1 - cell_acceptance(logq_NC, p_NC)


def negative_log_acceptance(logq_NC: Tensor, p_NC: Tensor) -> Tensor:
    return -cell_acceptance(logq_NC, p_NC).clamp(min=LEAST_MASS).log()


def lk_hybrid(logq_NC: Tensor, p_NC: Tensor) -> Tensor:
    alpha_N = cell_acceptance(logq_NC, p_NC)
    kl_share_N = torch.exp(-3 * alpha_N.detach())
    kl_N = cross_entropy(logq_NC, p_NC) + torch.special.entr(p_NC).mul(-1).sum(-1)
    return kl_share_N * kl_N + (1 - kl_share_N) * (1 - alpha_N)


def cell_acceptance(logq_NC: Tensor, p_NC: Tensor) -> Tensor:
    """α on the coarse cells: an upper bound, as two unlike shapes within the last cell count as equal."""
    return torch.minimum(logq_NC.exp(), p_NC).sum(-1)


LOSSES: dict[str, CellLoss] = {
    "ce": cross_entropy,
    "tv": total_variation,
    "nla": negative_log_acceptance,
    "lk_hybrid": lk_hybrid,
}


def head_loss_named(name: str) -> HeadLoss:
    """One of LOSSES, fused with the output matrix. UserError names those there are."""
    if name not in LOSSES:
        raise UserError(f"train.loss={name!r} is not a loss. {allowed(name, LOSSES)}")
    return partial(_head_loss, LOSSES[name])


def head_loss(hidden_NM: Tensor, head_VM: Tensor, ids_NK: Tensor, logp_NK: Tensor, weight_N: Tensor) -> Tensor:
    """Σ_n weight_n CE_n for a draft whose logits are hidden @ head.T, against the kept target distribution.

    The product with the head runs in bfloat16 under autocast, else in the dtype of `hidden_NM`; sums are float32.
    """
    return _head_loss(cross_entropy, hidden_NM, head_VM, ids_NK, logp_NK, weight_N)


def _head_loss(
    cell_loss: CellLoss, hidden_NM: Tensor, head_VM: Tensor, ids_NK: Tensor, logp_NK: Tensor, weight_N: Tensor
) -> Tensor:
    total: Tensor = _FusedHeadLoss.apply(cell_loss, hidden_NM, head_VM, ids_NK, logp_NK, weight_N)
    return total


class _FusedHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        cell_loss: CellLoss,
        hidden_NM: Tensor,
        head_VM: Tensor,
        ids_NK: Tensor,
        logp_NK: Tensor,
        weight_N: Tensor,
    ) -> Tensor:
        device_type = hidden_NM.device.type
        compute = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else hidden_NM.dtype
        wide = torch.promote_types(hidden_NM.dtype, torch.float32)  # of what is summed
        head = head_VM.to(compute)
        grad_hidden = torch.zeros_like(hidden_NM)
        grad_head = torch.zeros_like(head_VM) if ctx.needs_input_grad[2] else None
        total = hidden_NM.new_zeros((), dtype=wide)
        for begin in range(0, len(hidden_NM), CHUNK):
            part = slice(begin, begin + CHUNK)
            hidden, ids, weight_N1 = hidden_NM[part].to(compute), ids_NK[part], weight_N[part, None]
            logq_NV = torch.log_softmax((hidden @ head.T).to(wide), dim=-1)
            logq_NC, p_NC = coarse_cells(logq_NV.gather(1, ids), logp_NK[part].to(wide))
            grad = logq_NV.exp_()  # reuses the memory; holds q from here on
            with torch.enable_grad():
                leaf_NC = logq_NC.requires_grad_()
                loss = (cell_loss(leaf_NC, p_NC) * weight_N1[:, 0]).sum()
            (h_NC,) = torch.autograd.grad(loss, leaf_NC)
            total += loss.detach()
            q_NK = grad.gather(1, ids)
            sum_N1, outside_N1 = h_NC.sum(-1, keepdim=True), h_NC[:, -1:] / logq_NC.detach()[:, -1:].exp()
            grad.mul_(outside_N1 - sum_N1)
            kept = torch.where(p_NC[:, :-1] > 0, h_NC[:, :-1] - q_NK * outside_N1, 0.0)
            grad.scatter_add_(1, ids, kept)
            grad = grad.to(compute)
            grad_hidden[part] = (grad @ head).to(grad_hidden.dtype)
            if grad_head is not None:
                grad_head += (grad.T @ hidden).to(grad_head.dtype)
        ctx.save_for_backward(grad_hidden, grad_head)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, Tensor, Tensor | None, None, None, None]:
        grad_hidden, grad_head = ctx.saved_tensors
        scale = grad_outputs[0].to(grad_hidden.dtype)
        return None, grad_hidden * scale, None if grad_head is None else grad_head * scale, None, None, None


def coarse_cells(logq_NK: Tensor, logp_NK: Tensor) -> tuple[Tensor, Tensor]:
    """(log q, p) by cell `[N, K + 1]`, the last cell being all tokens not kept. p = 0 marks a token that the draft
    cannot propose: its cell counts for nothing (log q = 0 there), and its place belongs to the last one.
    """
    p_NK = logp_NK.exp()
    there = p_NK > 0
    out_N1 = (1 - torch.where(there, logq_NK.exp(), 0.0).sum(-1, keepdim=True)).clamp(min=LEAST_MASS)
    rest_N1 = (1 - p_NK.sum(-1, keepdim=True)).clamp(min=0)
    return torch.cat([torch.where(there, logq_NK, 0.0), out_N1.log()], -1), torch.cat([p_NK, rest_N1], -1)


def coarse_cross_entropy(logits_NV: Tensor, ids_NK: Tensor, logp_NK: Tensor) -> Tensor:
    """CE per position from plain logits: what `head_loss` computes without forming them."""
    logq_NV = torch.log_softmax(logits_NV.float(), dim=-1)
    return cross_entropy(*coarse_cells(logq_NV.gather(1, ids_NK), logp_NK.float()))


def restrict(ids_NK: Tensor, logp_NK: Tensor, place_V: Tensor) -> tuple[Tensor, Tensor]:
    """The kept distribution on a reduced draft vocabulary, renormalised there (EAGLE-3): `place_V[v]` is v's place in
    it, or −1. Tokens outside get place 0 and p = 0, which the losses leave out.
    """
    place_NK = place_V[ids_NK]
    p_NK = logp_NK.float().exp().masked_fill(place_NK < 0, 0.0)
    outside_N1 = logp_NK.float().exp().sum(-1, keepdim=True) - p_NK.sum(-1, keepdim=True)
    return place_NK.clamp(min=0), (p_NK / (1 - outside_N1).clamp(min=LEAST_MASS)).log()


def acceptance(logits_NV: Tensor, ids_NK: Tensor, logp_NK: Tensor) -> Tensor:
    """α per position, Σ_v min(p_v, q_v) over the kept tokens: a lower bound, short by at most the mass not kept."""
    q_NK = torch.softmax(logits_NV.float(), dim=-1).gather(1, ids_NK)
    return torch.minimum(q_NK, logp_NK.float().exp()).sum(-1)
