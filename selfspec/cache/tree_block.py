"""Tree attention on the cache: queries that see the text before the tree, their own ancestors, and themselves.

The nodes of a tree stand side by side behind a row's tokens, node i in slot `first + i`, while their *positions* (what
rotary embeddings and windows go by) count depth: two children of one node have one position and two slots. Once a path
is accepted, `move` brings its keys and values to the slots of a chain, and nothing of the rest of the tree is left.

Shape letters: B rows, T queries of this pass, N slots of the tree, S slots of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from selfspec.cache.interface import Cache


@dataclass(frozen=True)
class TreeBlock:
    """Where the queries of a pass write, and what of the tree they see."""

    slots_BT: Tensor  # int64, counted like positions; −1: a row that takes no part
    first_B: Tensor  # the slot of the tree's node 0
    positions_BN: Tensor  # of all nodes
    seen_BTN: Tensor  # bool: the node is the query's ancestor, or the query itself

    def hidden_BTS(self, positions_BT: Tensor, slot_ids_S: Tensor, window: int | None) -> Tensor:
        """True where a query must not look."""
        relative_BS = slot_ids_S - self.first_B[:, None]
        node_BS = relative_BS.clamp(min=0, max=self.positions_BN.shape[1] - 1)
        in_tree_B1S = (relative_BS >= 0)[:, None]
        beyond_B1S = (relative_BS >= self.positions_BN.shape[1])[:, None]
        seen_BTS = self.seen_BTN.gather(2, node_BS[:, None].expand(-1, self.seen_BTN.shape[1], -1))
        hidden_BTS = in_tree_B1S & (beyond_B1S | ~seen_BTS)
        if window is not None:
            key_positions_BS = torch.where(relative_BS >= 0, self.positions_BN.gather(1, node_BS), slot_ids_S)
            hidden_BTS |= positions_BT[..., None] - key_positions_BS[:, None] >= window
        return hidden_BTS


def move(cache: Cache, from_BT: Tensor, to_BT: Tensor) -> None:
    """Copy the keys and values of all layers between positions of the same rows; −1 moves nothing. All are read before
    any is written. Cost: two small copies, of all layers at once where they have one shape.
    """
    sources_N, targets_N = cache.slots_of(from_BT).reshape(-1), cache.slots_of(to_BT).reshape(-1)
    for layers_LSX in cache.alike:
        layers_LSX.index_copy_(1, targets_N, layers_LSX.index_select(1, sources_N))
