"""Growing a draft tree of a fixed shape, level by level: where a drafter's logits become the nodes of a tree.

A drafter iterates over the levels, runs the nodes of a level that have children (`nodes`), and hands their logits to
`grow`, which draws the children and writes them behind the row's tokens, node i at slot length + i. Candidates are the
best by the draft at temperature 0 and under `coupled`, and drawn without replacement under `rejection`, with q kept.
`selfspec.decoding.dynamic_drafting` does the same for trees that follow the draft's confidence.

Shape letters: B rows, n nodes of one level, N nodes of the tree, C most children, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from selfspec.cache.tree_block import TreeBlock
from selfspec.decoding.tree_layout import TreeLayout, block_of
from selfspec.drafters.base import Draft
from selfspec.lookahead import Plan
from selfspec.lookahead.tree_shape import TreeShape
from selfspec.sampling.acceptance.tree import Tree

if TYPE_CHECKING:
    from selfspec.decoding.rows import Rows
    from selfspec.decoding.sampler import Sampler


class Growing(Protocol):
    """One draft phase of a tree, as drafters see it. Iterate over it for the levels that are expanded."""

    plan: Plan

    def __iter__(self) -> Iterator[int]:
        """Levels 0 to depth − 1; the nodes of the last one are leaves."""

    @property
    def nodes(self) -> slice:
        """The slots of the nodes that are expanded at this level: those `grow` wants logits of."""

    @property
    def drawn(self) -> slice:
        """The slots that the last `grow` has filled. A draft that is verified from a later layer on runs them all, the
        nodes of the next level first among them; after the last level they are leaves.
        """

    def of_parents(self, from_nodes_BnX: Tensor) -> Tensor:
        """What the parents of `nodes` had, among the expanded nodes of the level before."""

    def block(self, slots: slice, behind: int = 0) -> tuple[Tensor, TreeBlock]:
        """Positions `[B, n]` of what stands in these slots and what it sees: `tree_layout.block_of`."""

    def grow(self, logits_BnV: Tensor) -> None:
        """The drafter's own logits at `nodes` -> their children. `[B, 1, V]`: the same at all of them."""

    def draft(self, hidden_BPM: Tensor | None = None, first_layer: int = 0) -> Draft:
        """All that was drawn. hidden: at the input of `first_layer`, of every slot that was run, in order."""


@runtime_checkable
class GrowsTrees(Protocol):
    """A drafter that can draft several continuations at once."""

    def propose_tree(self, rows: Rows, growing: Growing) -> Draft:
        """A draft whose nodes were drawn with `growing`."""


class TreeDrafting:
    """`Growing` for a static tree."""

    def __init__(self, rows: Rows, plan: Plan, sampler: Sampler) -> None:
        assert isinstance(plan.tree, TreeShape)
        self.plan, self.shape = plan, plan.tree
        self._rows, self._sampler = rows, sampler
        self._tables = tables_of(self.shape, rows.device)
        self._level = 0
        self._exist = [torch.ones_like(rows.active_B)[:, None]]  # [B, nodes of a level]: whether they were drawn
        self._q: list[Tensor] = []
        self._log_q: list[Tensor] = []
        self._broken: list[Tensor] = []  # of the nodes with children

    def __iter__(self) -> Iterator[int]:
        for level in range(self.shape.depth):
            self._level = level
            yield level

    @property
    def nodes(self) -> slice:
        first, inner, _ = self.shape.levels[self._level]
        return slice(first, inner)

    @property
    def drawn(self) -> slice:
        first, _, end = self.shape.levels[self._level + 1]
        return slice(first, end)

    def of_parents(self, from_nodes_BnX: Tensor) -> Tensor:
        first = self.shape.levels[self._level - 1][0]
        return from_nodes_BnX.index_select(1, self._tables.parents_N[self.nodes] - first)

    def block(self, slots: slice, behind: int = 0) -> tuple[Tensor, TreeBlock]:
        layout = self._tables.layout
        own = layout.slots_RN[:, slots], layout.depths_RN[:, slots], layout.seen_RNP[:, slots]
        return block_of(self._rows, *own, layout.slot_depths_RP, behind)

    def grow(self, logits_BnV: Tensor) -> None:
        nodes, drawn, rows = self.nodes, self.drawn, self._rows
        num_nodes = nodes.stop - nodes.start
        logits_BnV = self._sampler.transform_level(rows, self._tables.layout.seen_RNP[:, nodes], logits_BnV)
        most = max(len(self.shape.children[node]) for node in range(nodes.start, nodes.stop))
        children = self._sampler.draw_children(
            rows, logits_BnV, most, nodes.start, num_nodes, self._level, self._tables.most_children
        )
        if children.q_BnV is not None:
            self._q.append(children.q_BnV)
        # node by node of the next level: its parent's place in this one, its rank
        parents_L, ranks_L = self._tables.parents_N[drawn] - nodes.start, self._tables.ranks_N[drawn]
        if children.tokens_BnC.shape[1] == 1:
            parents_L = torch.zeros_like(parents_L)  # the same for all
        places_L = parents_L * most + ranks_L
        rows.propose(drawn.start - 1, children.tokens_BnC.flatten(1).index_select(1, places_L))
        self._exist.append(children.exist_BnC.flatten(1).index_select(1, places_L))
        self._broken.append(children.broken_Bn.expand(-1, num_nodes))
        if children.log_q_BnC is not None:
            self._log_q.append(children.log_q_BnC.flatten(1).index_select(1, places_L))

    def draft(self, hidden_BPM: Tensor | None = None, first_layer: int = 0) -> Draft:
        rows, shape, tables = self._rows, self.shape, self._tables
        tokens_BN = rows.window(0, shape.num_nodes)
        exist_BN = torch.cat(self._exist, 1)
        children_BNC = torch.where(exist_BN[:, tables.children_NC], tables.children_NC, 0)
        q_BNV = log_q_BN = None
        if self._q:
            q_BNV = torch.cat(self._q, 1).index_select(1, tables.drawn_from_N)
            self._q.clear()  # it would be in memory twice
        if self._log_q:
            log_q_BN = torch.cat([torch.zeros_like(self._log_q[0][:, :1]), *self._log_q], 1)
        broken_BN = F.pad(torch.cat(self._broken, 1), (0, 1)).index_select(1, tables.expanded_N)
        tree = Tree(tokens_BN, children_BNC, shape.depth, q_BNV, log_q_BN, broken_BN)
        num_drafted_B = torch.full_like(rows.lengths_B, shape.depth)
        return Draft(tokens_BN[:, 1:], num_drafted_B, None, hidden_BPM, first_layer, tree=tree, layout=tables.layout)


class Tables:
    """A shape as tensors, made once per shape and device."""

    def __init__(self, shape: TreeShape, device: torch.device) -> None:
        num = shape.num_nodes
        self.most_children = most = max(len(one) for one in shape.children)
        places = {node: place for place, node in enumerate(node for node in range(num) if shape.children[node])}
        # the place of each node among those with children, a leaf's behind them all
        self.expanded_N = torch.tensor([places.get(node, len(places)) for node in range(num)], device=device)
        self.drawn_from_N = self.expanded_N.clamp(max=len(places) - 1)  # of leaves, which draw nothing, any place
        self.parents_N = torch.tensor([0, *shape.parents], device=device)
        self.ranks_N = torch.tensor([0, *shape.ranks], device=device)
        children = [[*one, *[0] * (most - len(one))] for one in shape.children]
        self.children_NC = torch.tensor(children, device=device)
        seen_1NN = torch.zeros(1, num, num, dtype=torch.bool)
        for node, path in enumerate(shape.ancestors):
            seen_1NN[0, node, list(path)] = True
        depths_1N = torch.tensor([shape.depths], device=device)
        self.layout = TreeLayout(torch.arange(num, device=device)[None], depths_1N, seen_1NN.to(device), depths_1N)


@lru_cache(maxsize=64)
def tables_of(shape: TreeShape, device: torch.device) -> Tables:
    return Tables(shape, device)
