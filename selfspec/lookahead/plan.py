"""What a lookahead policy decides about one round, before it is drafted."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from selfspec.lookahead.tree_growth import TreeGrowth
from selfspec.lookahead.tree_shape import TreeShape

MOST_BEHIND = 256  # what is missing beyond this stays missing: it costs acceptance, and nothing else


@dataclass(frozen=True)
class Plan:
    """One round, the same for all rows. Hashable: a captured round is keyed by it."""

    num_drafted: int  # K, the most that is drafted; a policy with `goes_on` may end a row's draft before
    exit_layer: int | None = None  # for drafters that exit; None: their own
    tree: TreeShape | TreeGrowth | None = None  # None: a chain; num_drafted is a tree's depth
    behind: int = 0  # tokens that a drafter's own cache may lack, because the last rounds drafted nothing

    @property
    def width(self) -> int:
        """Slots that the round writes behind a row's text, the pending token's included."""
        return self.num_drafted + 1 if self.tree is None else self.tree.num_slots

    def after(self, num_undrafted: int, num_slots: int) -> Plan:
        """The same round after so many without a draft; rounded up, so that few shapes occur. num_slots: of a row, and
        no pass over what is missing, the token before it and the pending one may be longer.
        """
        if not num_undrafted or not self.num_drafted:
            return self
        behind = min(1 << (num_undrafted - 1).bit_length(), MOST_BEHIND, num_slots - 2)
        return replace(self, behind=behind)


@dataclass(frozen=True)
class RoundOutcome:
    """What a round brought, told to the policy once the host has read it (on CUDA a round late)."""

    plan: Plan
    num_drafted: list[int]  # per decoding row
    num_accepted: list[int]
    num_emitted: list[int]
    draft_s: float  # 0 where a round is one graph: then all time is in other_s
    verify_s: float
    other_s: float

    @property
    def round_s(self) -> float:
        return self.draft_s + self.verify_s + self.other_s


def draft_probabilities(logits_BV: Tensor, q_BV: Tensor | None) -> Tensor:
    """`[B, V]`: q, or softmax of the draft's transformed logits where drafts are drawn without making q."""
    return torch.softmax(logits_BV, -1, dtype=torch.float32) if q_BV is None else q_BV
