"""Binds the transforms, the acceptance rule and the seed to the rows: what drafters draw with and the round accepts
with.

p and q pass through the same transforms object, so they cannot come to differ by accident.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from selfspec.decoding.processors import GuardedProcessors
from selfspec.decoding.rows import Rows
from selfspec.decoding.tree_layout import TreeLayout
from selfspec.drafters.base import Draft
from selfspec.sampling import NoiseKey, Prefix, Rule, Verdict, faults
from selfspec.sampling.acceptance.tree import Children, Tree, TreeVerdict
from selfspec.sampling.acceptance.tree_rules import TreeRule


class LogitsTransform(Protocol):
    """What `selfspec.sampling.Transforms` is to the decoder. `stateful`: the prefix of every position is needed."""

    stateful: bool

    def __call__(self, logits_BTV: Tensor, prefix: Prefix | None = None) -> Tensor: ...


@dataclass(frozen=True)
class Drawn:
    """One drafted token per row, q `[B, V]` where the rule makes it, and the transformed logits; the largest of them
    where there is no q, which would show what is wrong with them.
    """

    token_B: Tensor
    q_BV: Tensor | None
    logits_BV: Tensor
    top_B: Tensor | None = None


@dataclass(frozen=True)
class Sampler:
    """Transforms, rule and seed of one decode call."""

    transforms: LogitsTransform
    rule: Rule
    seed: int | Tensor = 0
    guard: GuardedProcessors | None = None  # the caller's processors among the transforms
    tree_rule: TreeRule | None = None  # where the lookahead drafts trees

    def draw(self, rows: Rows, step: int, logits_BV: Tensor) -> Drawn:
        """A drafter's own logits for drafted token `step` -> the token, also written into the rows."""
        transformed_BV = self.transforms(logits_BV[:, None], self._prefix(rows, step, 1))[:, 0]
        token_B, q_BV = self.rule.draw(transformed_BV, self._noise(rows, step))
        rows.propose(step, token_B[:, None])
        top_B = transformed_BV.gather(1, token_B[:, None])[:, 0] if q_BV is None else None  # NaN counts as the largest
        return Drawn(token_B, q_BV, transformed_BV, top_B)

    def transform_level(self, rows: Rows, seen_RnP: Tensor, logits_BnV: Tensor) -> Tensor:
        """A drafter's own logits at nodes that see these slots -> transformed ones. `[B, 1, V]`, the same at all nodes,
        stays so unless what they see counts.
        """
        if not self.transforms.stateful:
            return self.transforms(logits_BnV)
        logits_BnV = logits_BnV.expand(-1, seen_RnP.shape[1], -1)
        return self.transforms(logits_BnV, self.tree_prefix(rows, seen_RnP))

    def draw_children(
        self,
        rows: Rows,
        transformed_BnV: Tensor,
        num_children: int,
        first_node: int,
        num_nodes: int,
        level: int,
        most_children: int,
    ) -> Children:
        """Of neighbouring nodes of a draft tree: `TreeRule.draw_children`."""
        assert self.tree_rule is not None
        noise = self._noise(rows, first_node)
        return self.tree_rule.draw_children(transformed_BnV, num_children, noise, num_nodes, level, most_children)

    def rank_children(
        self, rows: Rows, transformed_BnV: Tensor, num_children: int, level: int
    ) -> tuple[Children, Tensor]:
        """The likeliest ones, certain, and their log-probabilities: `TreeRule.rank_children`."""
        assert self.tree_rule is not None
        return self.tree_rule.rank_children(transformed_BnV, num_children, self._noise(rows, 0), level)

    def transform_tree(self, rows: Rows, layout: TreeLayout, logits_BNV: Tensor) -> Tensor:
        """The target's raw logits at every node of a tree -> the logits of p."""
        if self.guard is not None:
            self.guard.forget()
        return self.transforms(logits_BNV, self.tree_prefix(rows, layout.seen_RNP))

    def accept_tree(self, rows: Rows, tree: Tree, logits_BNV: Tensor) -> TreeVerdict:
        assert self.tree_rule is not None
        return self.tree_rule.accept(tree, logits_BNV, self._noise(rows, 0))

    def tree_prefix(self, rows: Rows, seen_RTP: Tensor) -> Prefix | None:
        """A node is conditioned on the row's tokens, its ancestors and itself."""
        if not self.transforms.stateful:
            return None
        ancestors_BTP = seen_RTP[..., 1:].expand(rows.num_rows, -1, -1)  # the root is the row's last token
        ends_B1 = torch.where(rows.active_B, rows.lengths_B + 1, 0)[:, None]
        ends_BT = ends_B1.expand(-1, ancestors_BTP.shape[1])
        return Prefix(rows.tokens_BS, ends_BT, rows.prompt_lens_B, ancestors_BTN=ancestors_BTP)

    def transform(self, rows: Rows, logits_BTV: Tensor) -> Tensor:
        """The target's raw logits at the pending and the drafted tokens -> the logits of p."""
        if self.guard is not None:
            self.guard.forget()
        return self.transforms(logits_BTV, self._prefix(rows, 0, logits_BTV.shape[1]))

    def accept(self, rows: Rows, draft: Draft, logits_BTV: Tensor) -> Verdict:
        """The logits of p at the pending and the drafted tokens -> what is accepted and what follows."""
        noise = self._noise(rows, 0)
        verdict = self.rule.accept(draft.tokens_BK, draft.q_BKV, draft.num_drafted_B, logits_BTV, noise)
        if draft.broken_BK is None:
            return verdict
        tested_B1 = torch.minimum(verdict.num_accepted_B + 1, draft.num_drafted_B)[:, None]
        tested_BK = torch.arange(draft.broken_BK.shape[1], device=rows.device) < tested_B1
        fault_BK = torch.where(draft.broken_BK & tested_BK, faults.BROKEN_DRAFT, faults.OK)
        return replace(verdict, error_B=faults.earliest(verdict.error_B, faults.first_fault(fault_BK)))

    def alpha(self, draft: Draft, logits_BTV: Tensor, verdict: Verdict) -> Tensor:
        """`[B, 2]` float64: Σ over the tested positions of α = Σ_v min(p, q), and how many positions were tested.

        Tested are the accepted drafts and the first rejected one. At temperature 0, p and q are one-hot and a position
        counts 1 or 0. Where the rule draws without making q (coupled, typical) nothing is measured: how often its
        drafts stand is not α.
        """
        num_drafted = draft.tokens_BK.shape[1]
        count_B = torch.minimum(verdict.num_accepted_B + 1, draft.num_drafted_B)
        if self.rule.name == "greedy":
            return torch.stack([verdict.num_accepted_B, count_B], 1).double()
        if not self.rule.needs_q or num_drafted == 0:
            return torch.zeros(len(count_B), 2, dtype=torch.float64, device=count_B.device)
        p_BKV = torch.softmax(logits_BTV[:, :num_drafted], -1, dtype=torch.float32)
        if draft.q_BKV is None:  # one-hot q: Σ_v min(p, q) is p of the drafted token
            overlap_BK = p_BKV.gather(-1, draft.tokens_BK[..., None])[..., 0]
        else:
            overlap_BK = torch.minimum(p_BKV, draft.q_BKV).sum(-1)
        tested_BK = torch.arange(num_drafted, device=count_B.device) < count_B[:, None]
        return torch.stack([torch.where(tested_BK, overlap_BK, 0).sum(-1).double(), count_B.double()], 1)

    def _prefix(self, rows: Rows, first: int, width: int) -> Prefix | None:
        """Row (b, t) is conditioned on everything up to and including the token at position lengths + first + t."""
        if not self.transforms.stateful:
            return None
        return Prefix(rows.tokens_BS, rows.positions(first, width) + 1, rows.prompt_lens_B)

    def _noise(self, rows: Rows, step: int) -> NoiseKey:
        return NoiseKey(self.seed, rows.request_B, rows.lengths_B + 1, step)
