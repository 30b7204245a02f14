"""Growing a draft tree to the draft's own confidence (`selfspec.lookahead.tree_growth`): EAGLE-2, on the device.

Children are certain, not drawn: the likeliest under the draft's transformed distribution (under `coupled`, together
with the noise that the target will draw with). Which candidates are verified depends on the text and on the draft
alone, so the output keeps the target's distribution (`selfspec.sampling.acceptance.tree`, certain children).

The tree is closed under parents: a path is never likelier than its beginning, also in floating point, where log-
probabilities of 0 and roundings make ties; among equals the sort keeps the order of levels, so parents come first.

Cost beside the drafter's passes: per level a top-k and a sum over [B, n, V]; at the end a sort of all candidates and a
dozen small gathers. Shapes depend on the `TreeGrowth` alone and nothing reads the host.

Shape letters: B rows, n = k nodes expanded per level, C = k children of each, A all candidates, X expanded slots, N
nodes of the verified tree, M = N − 1 of them without the root, P slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from selfspec.cache.tree_block import TreeBlock
from selfspec.decoding.tree_layout import TreeLayout, block_of
from selfspec.drafters.base import Draft
from selfspec.lookahead import Plan
from selfspec.lookahead.tree_growth import TreeGrowth
from selfspec.sampling.acceptance.tree import Tree

if TYPE_CHECKING:
    from selfspec.decoding.rows import Rows
    from selfspec.decoding.sampler import Sampler


class DynamicTreeDrafting:
    """`selfspec.decoding.tree_drafting.Growing` for a tree that differs by row and round."""

    def __init__(self, rows: Rows, plan: Plan, sampler: Sampler) -> None:
        assert isinstance(plan.tree, TreeGrowth)
        self.plan, self.growth = plan, plan.tree
        self._rows, self._sampler = rows, sampler
        self._tables = tables_of(self.growth, rows.device)
        self._level = 0
        self._tokens: list[Tensor] = []  # of the candidates, by level: [B, n*C]
        self._log_q: list[Tensor] = []  # of each below its parent, where it is to be recorded
        self._scores: list[Tensor] = []  # of their paths
        self._chosen: list[Tensor] = []  # [B, n]: which candidates of a level were expanded
        self._broken: list[Tensor] = []  # [B, n]: of the expanded nodes
        self._own_scores_Bn = torch.zeros(rows.num_rows, 1, device=rows.device)  # of this level's expanded nodes
        self._seen_BXP = self._tables.slots_PP[:1].expand(rows.num_rows, -1, -1)  # of all slots so far
        self._selection: Selection | None = None

    def __iter__(self) -> Iterator[int]:
        for level in range(self.growth.depth):
            self._level = level
            yield level

    @property
    def nodes(self) -> slice:
        first = self.growth.first_slots
        return slice(first[self._level], first[self._level + 1])

    @property
    def drawn(self) -> slice:
        first = self.growth.first_slots[self._level + 1]
        is_last = self._level + 1 == self.growth.depth
        return slice(first, self.growth.num_slots if is_last else self.growth.first_slots[self._level + 2])

    def of_parents(self, from_nodes_BnX: Tensor) -> Tensor:
        if from_nodes_BnX.shape[1] == 1:
            return from_nodes_BnX.expand(-1, self.growth.expanded[self._level], -1)
        parents_Bn = self._chosen[-1] // self.growth.top_k
        return from_nodes_BnX.gather(1, parents_Bn[..., None].expand(-1, -1, from_nodes_BnX.shape[-1]))

    def block(self, slots: slice, behind: int = 0) -> tuple[Tensor, TreeBlock]:
        tables, selection = self._tables, self._selection
        if slots.start < self.growth.first_slots[-1]:
            seen_BnP, depths_1P = self._seen_BXP[:, slots], tables.slot_depths_1P
            return block_of(self._rows, tables.slots_1P[:, slots], depths_1P[:, slots], seen_BnP, depths_1P, behind)
        assert selection is not None and slots == self.drawn, "the leaves are run together, after the last level"
        layout = selection.layout
        leaf_slots_BM = torch.where(selection.expanded_BM, -1, layout.slots_RN[:, 1:])
        own = leaf_slots_BM, layout.depths_RN[:, 1:], layout.seen_RNP[:, 1:]
        return block_of(self._rows, *own, layout.slot_depths_RP, behind)

    def grow(self, logits_BnV: Tensor) -> None:
        growth, nodes, rows = self.growth, self.nodes, self._rows
        logits_BnV = self._sampler.transform_level(rows, self._seen_BXP[:, nodes], logits_BnV)
        children, log_BnC = self._sampler.rank_children(rows, logits_BnV, growth.top_k, self._level)
        scores_BnC = self._own_scores_Bn[..., None] + log_BnC
        self._broken.append(children.broken_Bn.expand(scores_BnC.shape[:2]))
        self._tokens.append(children.tokens_BnC.expand(scores_BnC.shape).flatten(1))
        self._scores.append(scores_BnC.flatten(1))
        if children.log_q_BnC is not None:
            self._log_q.append(children.log_q_BnC.expand(scores_BnC.shape).flatten(1))
        if self._level + 1 < growth.depth:
            self._expand(nodes.start)
        else:
            self._select()

    def draft(self, hidden_BPM: Tensor | None = None, first_layer: int = 0) -> Draft:
        selection, rows = self._selection, self._rows
        assert selection is not None, "a level was left out"
        if hidden_BPM is not None:
            index_BN1 = selection.layout.slots_RN[..., None]
            hidden_BPM = hidden_BPM.gather(1, index_BN1.expand(-1, -1, hidden_BPM.shape[-1]))
        tree, num_drafted_B = selection.tree, torch.full_like(rows.lengths_B, self.growth.depth)
        return Draft(
            tree.tokens_BN[:, 1:], num_drafted_B, None, hidden_BPM, first_layer, tree=tree, layout=selection.layout
        )

    def _expand(self, first_slot: int) -> None:
        """The likeliest paths of the last level go on: their tokens take the next slots."""
        drawn = self.drawn
        top = self._scores[-1].topk(self.growth.top_k)
        self._own_scores_Bn = top.values
        self._chosen.append(top.indices)
        self._rows.propose(drawn.start - 1, self._tokens[-1].gather(1, top.indices))
        parents_Bn = first_slot + top.indices // self.growth.top_k
        seen_BnP = rows_of(self._seen_BXP, parents_Bn) | self._tables.slots_PP[drawn]
        self._seen_BXP = torch.cat([self._seen_BXP, seen_BnP], 1)

    def _select(self) -> None:
        """The likeliest of all candidates become nodes 1 to N − 1, in the order of levels."""
        tables, num_selected = self._tables, self.growth.num_nodes - 1
        scores_BA, tokens_BA = torch.cat(self._scores, 1), torch.cat(self._tokens, 1)
        best_BA = scores_BA.sort(dim=1, descending=True, stable=True).indices
        selected_BM = best_BA[:, :num_selected].sort(dim=1).values
        tokens_BM, exist_BM = tokens_BA.gather(1, selected_BM), scores_BA.gather(1, selected_BM) > -torch.inf
        # candidates as nodes, and as expanded slots; slots as candidates, hence as nodes
        node_BA = torch.zeros_like(best_BA).scatter_(1, selected_BM, tables.nodes_1M.expand_as(selected_BM))
        candidates = [first + one for first, one in zip(tables.first_candidates, self._chosen, strict=True)]
        candidate_BX = torch.cat(candidates, 1) if candidates else best_BA[:, :0]
        slot_BA = torch.zeros_like(best_BA).scatter_(1, candidate_BX, tables.expanded_1X.expand_as(candidate_BX))
        node_of_slot_BX = F.pad(node_BA.gather(1, candidate_BX), (1, 0))
        parent_slots_BM, ranks_BM = tables.parent_slots_A[selected_BM], tables.ranks_A[selected_BM]
        expanded_slots_BM, depths_BM = slot_BA.gather(1, selected_BM), tables.depths_A[selected_BM]
        expanded_BM = expanded_slots_BM > 0
        slots_BM = torch.where(expanded_BM, expanded_slots_BM, tables.leaf_slots_1M)
        seen_BMP = rows_of(self._seen_BXP, parent_slots_BM) | tables.slots_PP[slots_BM]
        root_seen_B1P = self._seen_BXP[:, :1]
        layout = TreeLayout(
            F.pad(slots_BM, (1, 0)),
            F.pad(depths_BM, (1, 0)),
            torch.cat([root_seen_B1P, seen_BMP], 1),
            torch.cat([tables.slot_depths_1P[:, :-num_selected].expand(len(slots_BM), -1), depths_BM], 1),
        )
        self._rows.propose(self.growth.first_slots[-1] - 1, tokens_BM)
        most, num_nodes = self.growth.top_k, self.growth.num_nodes
        place_BM = node_of_slot_BX.gather(1, parent_slots_BM) * most + ranks_BM
        place_BM = torch.where(exist_BM, place_BM, num_nodes * most)  # one more place, for those that do not exist
        children_BZ = place_BM.new_zeros(len(place_BM), num_nodes * most + 1)
        children_BZ.scatter_(1, place_BM, tables.nodes_1M.expand_as(place_BM))
        children_BNC = children_BZ[:, :-1].unflatten(1, (num_nodes, most))
        tokens_BN = torch.cat([self._rows.window(0, 1), tokens_BM], 1)
        log_q_BN = F.pad(torch.cat(self._log_q, 1).gather(1, selected_BM), (1, 0)) if self._log_q else None
        broken_BX = torch.cat(self._broken, 1)
        broken_BM = broken_BX.gather(1, expanded_slots_BM) & expanded_BM
        broken_BN = torch.cat([broken_BX[:, :1], broken_BM], 1)
        tree = Tree(tokens_BN, children_BNC, self.growth.depth, None, log_q_BN, broken_BN)
        self._selection = Selection(tree, layout, expanded_BM)


@dataclass(frozen=True)
class Selection:
    """The tree that is verified. expanded_BM: which of its nodes the draft has run."""

    tree: Tree
    layout: TreeLayout
    expanded_BM: Tensor


def rows_of(seen_BXP: Tensor, slots_Bn: Tensor) -> Tensor:
    """What is seen from these slots."""
    return seen_BXP.gather(1, slots_Bn[..., None].expand(-1, -1, seen_BXP.shape[2]))


class Tables:
    """What of a growth is the same in every round, made once per growth and device."""

    def __init__(self, growth: TreeGrowth, device: torch.device) -> None:
        num_leaves = growth.num_nodes - 1
        depths = [level for level, count in enumerate(growth.expanded) for _ in range(count)]
        self.slots_1P = torch.arange(growth.num_slots, device=device)[None]
        self.slots_PP = torch.eye(growth.num_slots, dtype=torch.bool, device=device)
        self.slot_depths_1P = torch.tensor([depths + [0] * num_leaves], device=device)  # leaves: not known yet
        self.expanded_1X = self.slots_1P[:, 1 : growth.first_slots[-1]]
        self.leaf_slots_1M = self.slots_1P[:, growth.first_slots[-1] :]
        self.nodes_1M = torch.arange(1, growth.num_nodes, device=device)[None]
        slots_X = self.slots_1P[0, : growth.first_slots[-1]]
        self.parent_slots_A = slots_X.repeat_interleave(growth.top_k)
        self.depths_A = self.slot_depths_1P[0, : growth.first_slots[-1]].repeat_interleave(growth.top_k) + 1
        self.ranks_A = torch.arange(growth.top_k, device=device).repeat(len(slots_X))
        # of the levels whose candidates may be expanded
        self.first_candidates = [growth.top_k * growth.first_slots[level] for level in range(growth.depth - 1)]


@lru_cache(maxsize=64)
def tables_of(growth: TreeGrowth, device: torch.device) -> Tables:
    return Tables(growth, device)
