"""Coupled acceptance: target and drafter share the noise of each position, so sampled output equals AR token for token.

The target's own draw at a position is argmax(log p + gumbel(seed, request, position)), a sample from p (Gumbel-max).
The drafter draws with the same noise from q; a draft stands while it equals the target's own draw. Whatever the
drafter, K, batch or row order, the output is the sequence of the target's own draws. Agreement is at least
(1 - TV)/(1 + TV), below rejection's 1 - TV: that is the price. Cost: Gumbel noise and one argmax over [B, T, V].
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.sampling.acceptance.verdict import Verdict, match_own_choice
from selfspec.sampling.argmax import first_argmax
from selfspec.sampling.noise import NoiseKey, gumbel


def accept_coupled(drafted_BK: Tensor, num_drafted_B: Tensor, logits_BTV: Tensor, gumbel_BTV: Tensor) -> Verdict:
    """The longest prefix of drafts that equal the target's own draws, then the draw that differs."""
    return match_own_choice(drafted_BK, num_drafted_B, logits_BTV + gumbel_BTV)


class Coupled:
    name = "coupled"
    lossy = False
    needs_q = False

    def draw(self, logits_BV: Tensor, noise: NoiseKey) -> tuple[Tensor, Tensor | None]:
        position_B1 = noise.position_B[:, None] + noise.step
        noise_BV = gumbel(noise.seed, noise.request_B, position_B1, logits_BV.shape[-1])[:, 0]
        return first_argmax(logits_BV + noise_BV), None

    def accept(
        self, drafted_BK: Tensor, q_BKV: Tensor | None, num_drafted_B: Tensor, logits_BTV: Tensor, noise: NoiseKey
    ) -> Verdict:
        _, T, V = logits_BTV.shape
        position_BT = noise.position_B[:, None] + torch.arange(T, device=logits_BTV.device)
        return accept_coupled(
            drafted_BK, num_drafted_B, logits_BTV, gumbel(noise.seed, noise.request_B, position_BT, V)
        )
