"""What a draft is trained on: the target's next-token distribution, kept as its K likeliest tokens and the rest.

Loss (a cross-entropy between coarsened distributions; its gradient is that of KL(p || q) on the same cells):

    L = − Σ_{v in S} p_v log q_v − p_o log q_o      S: the K likeliest tokens of p;  p_o, q_o: the mass outside S

so q is pulled to p on S and keeps the right mass outside, whatever its shape there.  dL/dz_v is q_v − p_v in S and
q_v (1 − p_o/q_o) outside. `head_loss` fuses it with the output matrix in chunks (as Liger's fused linear cross-entropy
does): [N, V] logits never exist at once, which spares the gigabyte that a CPU would page in anew at every step.

Shape letters: N supervised positions, K kept tokens, V vocabulary, M width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 256  # positions whose logits exist at one time
LEAST_MASS = 1e-6


class _FusedHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NM: Tensor, head_VM: Tensor, ids_NK: Tensor, logp_NK: Tensor, weight_N: Tensor
    ) -> Tensor:
        compute = torch.bfloat16 if torch.is_autocast_enabled(hidden_NM.device.type) else hidden_NM.dtype
        head = head_VM.to(compute)
        grad_hidden = torch.zeros_like(hidden_NM)
        grad_head = torch.zeros_like(head_VM) if ctx.needs_input_grad[1] else None
        total = hidden_NM.new_zeros((), dtype=torch.float32)
        for begin in range(0, len(hidden_NM), CHUNK):
            part = slice(begin, begin + CHUNK)
            hidden = hidden_NM[part].to(compute)
            p_NK = logp_NK[part].float().exp()
            rest_N1 = (1 - p_NK.sum(-1, keepdim=True)).clamp(min=0)
            logq = torch.log_softmax((hidden @ head.T).float(), dim=-1)
            logq_NK = logq.gather(1, ids_NK[part])
            grad = logq.exp_()  # reuses the memory; holds q from here on
            q_NK = grad.gather(1, ids_NK[part]) * (p_NK > 0)  # p = 0 marks tokens that the draft cannot propose
            out_N1 = (1 - q_NK.sum(-1, keepdim=True)).clamp(min=LEAST_MASS)
            loss_N = -(p_NK * logq_NK).sum(-1) - (rest_N1 * out_N1.log())[:, 0]
            total += (loss_N * weight_N[part]).sum()
            weight_N1, outside_N1 = weight_N[part, None], 1 - rest_N1 / out_N1
            grad.mul_(outside_N1 * weight_N1)
            grad.scatter_add_(1, ids_NK[part], (q_NK * (1 - outside_N1) - p_NK) * weight_N1)
            grad = grad.to(compute)
            grad_hidden[part] = (grad @ head).to(grad_hidden.dtype)
            if grad_head is not None:
                grad_head += (grad.T @ hidden).to(grad_head.dtype)
        ctx.save_for_backward(grad_hidden, grad_head)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        grad_hidden, grad_head = ctx.saved_tensors
        scale = grad_outputs[0]
        return grad_hidden * scale, None if grad_head is None else grad_head * scale, None, None, None


def head_loss(hidden_NM: Tensor, head_VM: Tensor, ids_NK: Tensor, logp_NK: Tensor, weight_N: Tensor) -> Tensor:
    """Σ_n weight_n L_n for a draft whose logits are hidden @ head.T, against the kept target distribution.

    The product with the head runs in bfloat16 under autocast, else in the dtype of `hidden_NM`; sums are float32.
    """
    total: Tensor = _FusedHeadLoss.apply(hidden_NM, head_VM, ids_NK, logp_NK, weight_N)
    return total


def coarse_cross_entropy(logits_NV: Tensor, ids_NK: Tensor, logp_NK: Tensor) -> Tensor:
    """L per position from plain logits: what `head_loss` computes, written down directly (tests compare the two)."""
    logq_NV = torch.log_softmax(logits_NV.float(), dim=-1)
    logq_NK = logq_NV.gather(1, ids_NK)
    p_NK = logp_NK.float().exp()
    rest_N = (1 - p_NK.sum(-1)).clamp(min=0)
    out_N = (1 - (logq_NK.exp() * (p_NK > 0)).sum(-1)).clamp(min=LEAST_MASS)
    return -(p_NK * logq_NK).sum(-1) - rest_N * out_N.log()


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
