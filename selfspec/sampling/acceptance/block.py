"""Block verification: Sun et al. 2024 (arXiv 2403.10444), Algorithm 2. Exact, and never accepts less.

Drafts are judged together instead of one by one. With p_0 = 1 and r_i = p(x_i)/q(x_i),

    p_i = min(p_{i-1} r_i, 1)                                  how much of the path's mass may stand
    h_i = R_i / (R_i + 1 - p_i),  R_i = sum_v max(p_i p(v) - q(v), 0)    at i < K;   h_K = p_K

and the block ends at the largest i with u_i < h_i (or 0). Then the next token is drawn from norm(max(p_i p - q, 0)), or
from p when i = K. Proof in one line: P(block reaches i | path) = S + (1 - S) h_i = p_i with S = sum_v min(p_i p, q).

K may differ per row and per round, and may depend on the drafts: at a node where the draft stopped h = p_i, as at K.
That is exact as long as the decision to stop at node i depends on x_1..x_i and the q's up to the next one only; a stop
that looks at the token just drawn and then withdraws it is not. Cost: one softmax and ~4 passes over [B, K, V].
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.sampling import faults
from selfspec.sampling.acceptance.rejection import sample_draft
from selfspec.sampling.acceptance.verdict import Verdict, at, check_draft, leading
from selfspec.sampling.distribution import draw, probabilities
from selfspec.sampling.noise import STREAM_VERIFY, NoiseKey, uniforms


def path_mass(p_x_BK: Tensor, q_x_BK: Tensor) -> Tensor:
    """p_0..p_K, float [B, K + 1]: the mass of the target that the path of drafts may carry, given p(x) and q(x)."""
    ratio_BK = p_x_BK / q_x_BK
    mass = [torch.ones_like(p_x_BK.sum(-1))]
    for k in range(p_x_BK.shape[1]):
        mass.append((mass[-1] * ratio_BK[:, k]).clamp_max(1))
    return torch.stack(mass, dim=1)


def stand(mass_BN: Tensor, p_BNV: Tensor, q_BNV: Tensor) -> Tensor:
    """h [B, N] at nodes where the draft went on with q; 1 where p_i = 1 and the residual is empty."""
    left_BN = (mass_BN[..., None] * p_BNV - q_BNV).clamp_min(0).sum(-1)
    total_BN = left_BN + 1 - mass_BN
    return torch.where(total_BN > 0, left_BN / total_BN, 1.0)


def accept_block(
    drafted_BK: Tensor,
    q_BKV: Tensor | None,
    num_drafted_B: Tensor,
    logits_BTV: Tensor,
    u_accept_BK: Tensor,
    u_residual_B: Tensor,
) -> Verdict:
    """Judge a chain of drafts with given uniforms; u_accept[:, k] belongs to the node behind draft k."""
    B, K = drafted_BK.shape
    check_draft(drafted_BK, q_BKV, logits_BTV)
    p_BTV = probabilities(logits_BTV)
    V = p_BTV.shape[-1]
    drafted_BK = drafted_BK.clamp(0, V - 1)
    if q_BKV is None:
        q_BKV = p_BTV.new_zeros((B, K, V)).scatter_(-1, drafted_BK[..., None], 1.0)
    p_x_BK = p_BTV[:, :K].gather(-1, drafted_BK[..., None])[..., 0]
    q_x_BK = q_BKV.gather(-1, drafted_BK[..., None])[..., 0]
    mass_BT = path_mass(p_x_BK, q_x_BK)
    # node i sits behind draft i; the last one has no q: an all-zero q gives R = p_i, and h = p_i by the branch below
    q_BTV = torch.nn.functional.pad(q_BKV, (0, 0, 0, 1))
    node_T = torch.arange(K + 1, device=drafted_BK.device)
    # a row of bad logits (softmax makes it NaN) ends the chain: it is met exactly as often as without speculation
    num_tested_B = leading(~p_BTV[:, :K, 0].isnan(), num_drafted_B)
    last_BT = node_T == num_tested_B[:, None]
    h_BT = torch.where(last_BT, mass_BT, stand(mass_BT, p_BTV, q_BTV))
    real_BK = node_T[1:] <= num_tested_B[:, None]
    stands_BK = (u_accept_BK < h_BT[:, 1:]) & real_BK
    num_accepted_B = (stands_BK * node_T[1:]).amax(-1) if K > 0 else torch.zeros_like(num_drafted_B)
    p_BV, mass_B1 = at(p_BTV, num_accepted_B), mass_BT.gather(1, num_accepted_B[:, None])
    q_BV = torch.where((num_accepted_B < num_tested_B)[:, None], at(q_BTV, num_accepted_B), 0)
    difference_BV = (mass_B1 * p_BV - q_BV).clamp_min(0)
    weights_BV = torch.where(difference_BV.amax(-1, keepdim=True) > 0, difference_BV, p_BV)
    judged_BK = node_T[:K] < num_tested_B[:, None]  # where p is bad, a bad q is not the drafter's fault
    error_B = faults.earliest(
        faults.ending_fault(logits_BTV, num_accepted_B), faults.draft_fault(q_BKV, q_x_BK, judged_BK)
    )
    return Verdict(num_accepted_B, draw(weights_BV, u_residual_B), error_B)


class Block:
    name = "block"
    lossy = False
    needs_q = True

    def draw(self, logits_BV: Tensor, noise: NoiseKey) -> tuple[Tensor, Tensor | None]:
        return sample_draft(logits_BV, noise)

    def accept(
        self, drafted_BK: Tensor, q_BKV: Tensor | None, num_drafted_B: Tensor, logits_BTV: Tensor, noise: NoiseKey
    ) -> Verdict:
        u_BT = uniforms(noise.seed, noise.request_B, noise.position_B, STREAM_VERIFY, logits_BTV.shape[1])
        return accept_block(drafted_BK, q_BKV, num_drafted_B, logits_BTV, u_BT[:, 1:], u_BT[:, 0])
