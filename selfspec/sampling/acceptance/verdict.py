"""What every acceptance rule shares: the protocol a rule implements and the verdict it returns.

A rule is two pure functions. `draw` is how a drafter turns its transformed logits into a token and the q it came from;
`accept` compares drafts with the target. Both run on the device without host reads. At K = 0 `accept` is a plain draw
from p: autoregressive decoding is the same code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from selfspec.errors import UserError
from selfspec.sampling import faults
from selfspec.sampling.argmax import first_argmax
from selfspec.sampling.noise import NoiseKey


@dataclass(frozen=True)
class Verdict:
    """int64 [B] each: accepted drafts, the bonus or correction token, and a fault code (0 is fine; `raise_for`)."""

    num_accepted_B: Tensor
    next_token_B: Tensor
    error_B: Tensor


class Rule(Protocol):
    """`lossy`: the output does not follow p. `needs_q`: drafts must come with the q they were drawn from."""

    name: str
    lossy: bool
    needs_q: bool

    def draw(self, logits_BV: Tensor, noise: NoiseKey) -> tuple[Tensor, Tensor | None]:
        """Transformed draft logits [B, V] -> token [B] and q [B, V], or None where the token is certain."""
        ...

    def accept(
        self,
        drafted_BK: Tensor,
        q_BKV: Tensor | None,
        num_drafted_B: Tensor,
        logits_BTV: Tensor,
        noise: NoiseKey,
    ) -> Verdict:
        """Transformed target logits at T = K + 1 positions judge the drafts; q None means certain (one-hot) drafts.

        Positions k >= num_drafted_B[b] are padding: never accepted, never looked at.
        """
        ...


def check_draft(drafted_BK: Tensor, q_BKV: Tensor | None, logits_BTV: Tensor) -> None:
    """Shapes and dtype, which the host knows without reading anything. Raises UserError."""
    B, K = drafted_BK.shape
    V = logits_BTV.shape[-1]
    if logits_BTV.shape != (B, K + 1, V):
        raise UserError(f"{K} drafts in {B} rows need logits [{B}, {K + 1}, V], got {list(logits_BTV.shape)}.")
    if q_BKV is None:
        return
    if q_BKV.shape != (B, K, V):
        raise UserError(f"{K} drafts in {B} rows need q [{B}, {K}, {V}], got {list(q_BKV.shape)}.")
    if q_BKV.dtype not in (torch.float32, torch.float64):
        raise UserError(
            f"q came in {q_BKV.dtype}: rounded, it is not what the drafts were drawn from, and the output would be "
            "biased. Pass on the float32 q that the rule's draw() gave."
        )


def leading(ok_BK: Tensor, num_drafted_B: Tensor) -> Tensor:
    """int64 [B]: how many drafts are ok before the first that is not; padding is never ok."""
    real_BK = torch.arange(ok_BK.shape[1], device=ok_BK.device) < num_drafted_B[:, None]
    return (ok_BK & real_BK).to(torch.int64).cumprod(dim=1).sum(dim=1)


def at(rows: Tensor, index_B: Tensor) -> Tensor:
    """rows [B, T, ...] -> [B, ...]: one entry per row (fixed shapes), copied whole; a gather looks up every number."""
    B, T = rows.shape[:2]
    return rows.flatten(0, 1).index_select(0, index_B + T * torch.arange(B, device=rows.device))


def match_own_choice(drafted_BK: Tensor, num_drafted_B: Tensor, scores_BTV: Tensor) -> Verdict:
    """Accept while the draft is what the target itself chooses, the argmax of scores [B, T, V]."""
    check_draft(drafted_BK, None, scores_BTV)
    chosen_BT = first_argmax(scores_BTV)
    top_BT = scores_BTV.gather(-1, chosen_BT[..., None])[..., 0]
    K = drafted_BK.shape[1]
    ok_BK = (drafted_BK == chosen_BT[:, :K]) & torch.isfinite(top_BT[:, :K])
    num_accepted_B = leading(ok_BK, num_drafted_B)
    error_B = faults.at_offset(faults.logits_fault(at(top_BT, num_accepted_B)), num_accepted_B)
    return Verdict(num_accepted_B, at(chosen_BT, num_accepted_B), error_B)
