"""The tokens of a draft that are run at once: a step of a chain, or nodes of a tree that stand in one stretch of slots.

Every drafter with a forward pass needs the same two things of them, their ids and a pass over a cache (the target's, or
one of its own), and a chain and a tree differ in where these come from and in nothing else:

    stretch = Stretch(rows, slice(step, step + 1))          # a chain; `selfspec.decoding.drafting`
    stretch = Stretch(rows, growing.nodes, growing)         # a tree; `selfspec.decoding.tree_drafting`
    hidden_BTM = model.run_layers(model.embed(stretch.token_ids_BT), 0, model.num_layers, stretch.open(cache))

Cost: nothing before it is asked, and a pass is opened once per cache.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from selfspec.cache import Cache, Pass
from selfspec.cache.tree_block import TreeBlock

if TYPE_CHECKING:
    from selfspec.decoding.rows import Rows
    from selfspec.decoding.tree_drafting import Growing


class Stretch:
    """slots: counted from the pending token's, 0; those of a chain may begin before it. growing: the tree that they are
    nodes of; None: a chain's tokens. behind: by how much the cache lags behind the target's, for a draft that reads at
    each position the token after it.
    """

    def __init__(self, rows: Rows, slots: slice, growing: Growing | None = None, behind: int = 0) -> None:
        self._rows, self._growing, self._behind = rows, growing, behind
        self._first, self._width = slots.start, slots.stop - slots.start
        self._slots = slots
        self._passes: dict[int, Pass] = {}

    @property
    def token_ids_BT(self) -> Tensor:
        """Committed or tentative."""
        return self._rows.window(self._first, self._width)

    def open(self, cache: Cache) -> Pass:
        """A pass over that cache; the same one however often it is asked for, so masks are made once."""
        if id(cache) not in self._passes:
            positions_BT, extent, block = self._place
            self._passes[id(cache)] = cache.open(positions_BT, extent, tree=block)
        return self._passes[id(cache)]

    @cached_property
    def _place(self) -> tuple[Tensor, int, TreeBlock | None]:
        """Positions `[B, T]`, how many slots a pass over them may read, and what nodes see of each other."""
        rows, first = self._rows, self._first - self._behind
        if self._growing is None:
            return rows.positions(first, self._width), rows.extent(first, self._width), None
        positions_BT, block = self._growing.block(self._slots, self._behind)
        return positions_BT, rows.extent(0, self._growing.plan.width), block
