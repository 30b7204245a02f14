"""Typical acceptance: Cai et al. 2024 (Medusa), section 3.3.2. LOSSY: the output does not follow p.

A draft stands while p(x) > min(epsilon, delta * exp(-H(p))): likely enough, or likely for how undecided p is. The token
after the last accepted draft is drawn from p, so the first token of a round without accepted drafts is a true sample.
Drafts are the drafter's argmax, as Medusa's candidates are. epsilon = 0.09 and delta = 0.3 are Medusa's defaults.
Cost: one softmax and the entropy over [B, T, V], one draw.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.sampling import faults
from selfspec.sampling.acceptance.verdict import Verdict, at, check_draft, leading
from selfspec.sampling.distribution import draw, probabilities
from selfspec.sampling.noise import STREAM_VERIFY, NoiseKey, uniforms

EPSILON, DELTA = 0.09, 0.3


def threshold(p: Tensor, epsilon: float = EPSILON, delta: float = DELTA) -> Tensor:
    """min(epsilon, delta * exp(-H)) of distributions [..., V]; 0 log 0 counts as 0."""
    entropy = -torch.xlogy(p, p).sum(dim=-1)
    return (delta * torch.exp(-entropy)).clamp_max(epsilon)


def accept_typical(drafted_BK: Tensor, num_drafted_B: Tensor, logits_BTV: Tensor, u_B: Tensor) -> Verdict:
    K = drafted_BK.shape[1]
    check_draft(drafted_BK, None, logits_BTV)
    p_BTV = probabilities(logits_BTV)
    drafted_BK = drafted_BK.clamp(0, p_BTV.shape[-1] - 1)
    p_x_BK = p_BTV[:, :K].gather(-1, drafted_BK[..., None])[..., 0]
    num_accepted_B = leading(p_x_BK > threshold(p_BTV[:, :K]), num_drafted_B)
    next_token_B = draw(at(p_BTV, num_accepted_B), u_B)
    return Verdict(num_accepted_B, next_token_B, faults.ending_fault(logits_BTV, num_accepted_B))


class Typical:
    name = "typical"
    lossy = True
    needs_q = False

    def draw(self, logits_BV: Tensor, noise: NoiseKey) -> tuple[Tensor, Tensor | None]:
        return logits_BV.argmax(dim=-1), None

    def accept(
        self, drafted_BK: Tensor, q_BKV: Tensor | None, num_drafted_B: Tensor, logits_BTV: Tensor, noise: NoiseKey
    ) -> Verdict:
        u_B = uniforms(noise.seed, noise.request_B, noise.position_B, STREAM_VERIFY, 1)[:, 0]
        return accept_typical(drafted_BK, num_drafted_B, logits_BTV, u_B)
