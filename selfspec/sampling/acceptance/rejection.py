"""Speculative sampling: Leviathan et al. 2023, Algorithm 1. The output follows p exactly.

Accept draft x with probability min(1, p(x)/q(x)), tested as u * q(x) < p(x) (strict, so p(x) = 0 never passes); at the
first rejection draw from norm(max(p - q, 0)); after full acceptance draw from p. A certain draft (q None) is a one-hot
q: accept with probability p(x), else p without x. Where p = q up to rounding the residual may be empty: then from p.
Cost: one softmax over [B, T, V], one draw over [B, V].
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.sampling import faults
from selfspec.sampling.acceptance.verdict import Verdict, at, check_draft, leading
from selfspec.sampling.distribution import draw, probabilities
from selfspec.sampling.noise import STREAM_DRAFT, STREAM_VERIFY, NoiseKey, uniforms


def accepted(p_x: Tensor, q_x: Tensor, u: Tensor) -> Tensor:
    """bool: draft x stands, given p(x), q(x) and a uniform u in (0, 1), all in the same shape. NaN never stands."""
    return u * q_x.double() < p_x


def residual(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    """Weights [B, V] (not normalised) of the token after a rejection: max(p - q, 0), or p where that is empty."""
    difference_BV = (p_BV - q_BV).clamp_min(0)
    return torch.where(difference_BV.amax(-1, keepdim=True) > 0, difference_BV, p_BV)


def accept_rejection(
    drafted_BK: Tensor,
    q_BKV: Tensor | None,
    num_drafted_B: Tensor,
    logits_BTV: Tensor,
    u_accept_BK: Tensor,
    u_residual_B: Tensor,
) -> Verdict:
    """Judge a chain of drafts with given uniforms. Faults are reported in the verdict's error_B."""
    K = drafted_BK.shape[1]
    check_draft(drafted_BK, q_BKV, logits_BTV)
    p_BTV = probabilities(logits_BTV)
    drafted_BK = drafted_BK.clamp(0, p_BTV.shape[-1] - 1)  # padding may hold anything
    p_x_BK = p_BTV[:, :K].gather(-1, drafted_BK[..., None])[..., 0]
    q_x_BK = torch.ones_like(p_x_BK) if q_BKV is None else q_BKV.gather(-1, drafted_BK[..., None])[..., 0]
    num_accepted_B = leading(accepted(p_x_BK, q_x_BK, u_accept_BK), num_drafted_B)
    p_BV = at(p_BTV, num_accepted_B)
    if K > 0:
        rejected_B = num_accepted_B < num_drafted_B
        q_BV = _q_at(drafted_BK, q_BKV, p_BV, num_accepted_B.clamp(max=K - 1))
        weights_BV = residual(p_BV, torch.where(rejected_B[:, None], q_BV, 0))
    else:
        weights_BV = p_BV
    error_B = faults.ending_fault(logits_BTV, num_accepted_B)
    if q_BKV is not None:
        k = torch.arange(K, device=drafted_BK.device)
        tested_BK = (k <= num_accepted_B[:, None]) & (k < num_drafted_B[:, None])
        error_B = faults.earliest(error_B, faults.draft_fault(q_BKV, q_x_BK, tested_BK))
    return Verdict(num_accepted_B, draw(weights_BV, u_residual_B), error_B)


def sample_draft(logits_BV: Tensor, noise: NoiseKey) -> tuple[Tensor, Tensor]:
    """Token [B] drawn from q [B, V] = softmax of the transformed draft logits.

    A drafter with nothing left (a small draft vocabulary under a strict transform) proposes token 0 for certain, which
    costs an acceptance and nothing else.
    """
    empty_B = logits_BV.amax(dim=-1) == -torch.inf
    logits_BV = logits_BV.clone()
    logits_BV[:, 0] = torch.where(empty_B, 0, logits_BV[:, 0])
    q_BV = probabilities(logits_BV)
    u_B1 = uniforms(noise.seed, noise.request_B, noise.position_B, STREAM_DRAFT, 1, first_index=noise.step)
    return draw(q_BV, u_B1[:, 0]), q_BV


def _q_at(drafted_BK: Tensor, q_BKV: Tensor | None, like_BV: Tensor, index_B: Tensor) -> Tensor:
    if q_BKV is not None:
        return at(q_BKV, index_B)
    return torch.zeros_like(like_BV).scatter_(-1, at(drafted_BK, index_B)[:, None], 1.0)


class Rejection:
    name = "rejection"
    lossy = False
    needs_q = True

    def draw(self, logits_BV: Tensor, noise: NoiseKey) -> tuple[Tensor, Tensor | None]:
        return sample_draft(logits_BV, noise)

    def accept(
        self, drafted_BK: Tensor, q_BKV: Tensor | None, num_drafted_B: Tensor, logits_BTV: Tensor, noise: NoiseKey
    ) -> Verdict:
        u_BT = uniforms(noise.seed, noise.request_B, noise.position_B, STREAM_VERIFY, logits_BTV.shape[1])
        return accept_rejection(drafted_BK, q_BKV, num_drafted_B, logits_BTV, u_BT[:, 1:], u_BT[:, 0])
