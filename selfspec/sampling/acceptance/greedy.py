"""Greedy acceptance: a draft stands while it is the target's argmax. Exact at temperature 0, whatever the drafter.

Cost: one argmax over [B, T, V], no softmax and no noise. Logits may be in any dtype: rounding them up to float32 does
not change an argmax. Ties fall to the smallest token id, as in `model.generate`.
"""

from __future__ import annotations

from torch import Tensor

from selfspec.sampling.acceptance.verdict import Verdict, match_own_choice
from selfspec.sampling.argmax import first_argmax
from selfspec.sampling.noise import NoiseKey


def accept_greedy(drafted_BK: Tensor, num_drafted_B: Tensor, logits_BTV: Tensor) -> Verdict:
    """The longest prefix of drafts that the target would have chosen, then the token that it chooses instead."""
    return match_own_choice(drafted_BK, num_drafted_B, logits_BTV)


class Greedy:
    name = "greedy"
    lossy = False
    needs_q = False

    def draw(self, logits_BV: Tensor, noise: NoiseKey) -> tuple[Tensor, Tensor | None]:
        return first_argmax(logits_BV), None

    def accept(
        self, drafted_BK: Tensor, q_BKV: Tensor | None, num_drafted_B: Tensor, logits_BTV: Tensor, noise: NoiseKey
    ) -> Verdict:
        return accept_greedy(drafted_BK, num_drafted_B, logits_BTV)
