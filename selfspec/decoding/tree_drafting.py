"""Growing a draft tree level by level: the one place where a drafter's logits become the nodes of a tree.

A drafter iterates over the levels, runs the nodes of a level that have children (`nodes`), and hands their logits to
`grow`, which draws the children and writes them behind the row's tokens, node i at slot length + i. Candidates are the
best by the draft at temperature 0 and under `coupled`, and drawn without replacement under `rejection`, with q kept.

Shape letters: B rows, n nodes of one level, N nodes of the tree, C most children, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from selfspec.cache.tree_block import TreeBlock
from selfspec.drafters.base import Draft
from selfspec.lookahead import Plan
from selfspec.lookahead.tree_shape import TreeShape
from selfspec.sampling.acceptance.tree import Tree

if TYPE_CHECKING:
    from selfspec.decoding.rows import Rows
    from selfspec.decoding.sampler import Sampler


@runtime_checkable
class GrowsTrees(Protocol):
    """A drafter that can draft several continuations at once."""

    def propose_tree(self, rows: Rows, growing: TreeDrafting) -> Draft:
        """A draft whose nodes were drawn with `growing`."""


class TreeDrafting:
    """One draft phase of a static tree. Iterate over it for the levels that have children; `draft` at the end."""

    def __init__(self, rows: Rows, plan: Plan, sampler: Sampler) -> None:
        assert plan.tree is not None
        self.plan, self.shape = plan, plan.tree
        self._rows, self._sampler = rows, sampler
        self._tables = tables_of(self.shape, rows.device)
        self._level = 0
        self._exist: list[Tensor] = [torch.ones_like(rows.active_B)]  # per node, whether it was drawn
        self._q: list[Tensor] = []

    def __iter__(self) -> Iterator[int]:
        """Levels 0 to depth − 1; the nodes of the last one are leaves."""
        for level in range(self.shape.depth):
            self._level = level
            yield level

    @property
    def nodes(self) -> slice:
        """The nodes of this level that have children."""
        first, inner, _ = self.shape.levels[self._level]
        return slice(first, inner)

    @property
    def parents(self) -> Tensor:
        """Int64 `[n]`: where the parents of `nodes` stand among the nodes of the level before."""
        first = self.shape.levels[self._level - 1][0]
        return self._tables.parents_N[self.nodes] - first

    def block(self, nodes: slice, behind: int = 0) -> tuple[Tensor, TreeBlock]:
        """Positions `[B, n]` of these nodes and what they see. behind: by how much a cache lags behind the target's (a
        draft that reads the token after each position has node i at slot length + i − 1, and no root).
        """
        return tree_block(self._rows, self.shape, nodes, behind)

    def grow(self, logits_BnV: Tensor) -> None:
        """The drafter's own logits at `nodes` -> their children."""
        nodes, shape, sampler, rows = self.nodes, self.shape, self._sampler, self._rows
        transformed_BnV = sampler.transforms(logits_BnV, sampler.tree_prefix(rows, shape, nodes))
        for place, node in enumerate(range(nodes.start, nodes.stop)):
            children = shape.children[node]
            tokens_BC, exist_BC, q_BV = sampler.draw_children(
                rows, transformed_BnV[:, place], len(children), node, self._level
            )
            if q_BV is not None:
                self._q.append(q_BV)
            for rank, child in enumerate(children):
                rows.propose(child - 1, tokens_BC[:, rank : rank + 1])
            self._exist.extend(exist_BC.unbind(1))

    def draft(self, hidden_BTM: Tensor | None = None, first_layer: int = 0) -> Draft:
        """All that was drawn. hidden: `[B, N, M]` at the input of `first_layer`, in the order of the nodes."""
        rows, shape = self._rows, self.shape
        tokens_BN = rows.window(0, shape.num_nodes)
        exist_BN = self._in_node_order()
        children_BNC = torch.where(exist_BN[:, self._tables.children_NC], self._tables.children_NC, 0)
        q_BNV = None
        if self._q:
            inner = [node for node in range(shape.num_nodes) if shape.children[node]]
            q_BNV = self._q[0].new_zeros(rows.num_rows, shape.num_nodes, self._q[0].shape[-1])
            q_BNV[:, inner] = torch.stack(self._q, 1)
            self._q.clear()
        tree = Tree(tokens_BN, children_BNC, shape.depth, q_BNV)
        num_drafted_B = torch.full_like(rows.lengths_B, shape.depth)
        return Draft(tokens_BN[:, 1:], num_drafted_B, None, hidden_BTM, first_layer, tree=tree, shape=shape)

    def _in_node_order(self) -> Tensor:
        """[B, N]: `_exist` is in the order of drawing, parent by parent."""
        drawn = [0, *(child for node in range(self.shape.num_nodes) for child in self.shape.children[node])]
        order = sorted(range(len(drawn)), key=drawn.__getitem__)
        return torch.stack([self._exist[i] for i in order], 1)


class Tables:
    """A shape as tensors, made once per shape and device."""

    def __init__(self, shape: TreeShape, device: torch.device) -> None:
        num, most = shape.num_nodes, max(len(one) for one in shape.children)
        self.parents_N = torch.tensor([0, *shape.parents], device=device)
        self.depths_N = torch.tensor(shape.depths, device=device)
        self.nodes_N = torch.arange(num, device=device)
        children = [[*one, *[0] * (most - len(one))] for one in shape.children]
        self.children_NC = torch.tensor(children, device=device)
        self.seen_NN = torch.zeros(num, num, dtype=torch.bool, device=device)
        for node, path in enumerate(shape.ancestors):
            self.seen_NN[node, list(path)] = True


@lru_cache(maxsize=64)
def tables_of(shape: TreeShape, device: torch.device) -> Tables:
    return Tables(shape, device)


def tree_block(rows: Rows, shape: TreeShape, nodes: slice, behind: int = 0) -> tuple[Tensor, TreeBlock]:
    """See `TreeDrafting.block`."""
    tables = tables_of(shape, rows.device)
    first_B1 = rows.lengths_B[:, None]
    takes_part_B1 = rows.active_B[:, None]
    positions_BN = first_B1 + tables.depths_N - behind
    positions_BT = torch.where(takes_part_B1, positions_BN[:, nodes], -1)
    slots_BT = torch.where(takes_part_B1, first_B1 + tables.nodes_N[nodes] - behind, -1)
    own = slice(behind, None)  # with `behind`, the root is no node of this cache: its place is the row's last token
    seen_BTN = tables.seen_NN[nodes, own].expand(rows.num_rows, -1, -1)
    return positions_BT, TreeBlock(slots_BT, rows.lengths_B, positions_BN[:, own], seen_BTN)
