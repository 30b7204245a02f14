"""Where the nodes of a round's trees stand behind the rows' text, and what each of them sees; on the device.

Nodes are numbered in the order in which they are verified, node 0 being the root (the pending token), parents before
children. Slots count from the pending token's; a static tree has node i in slot i, a dynamic one leaves some empty.

Shape letters: B rows, R rows that differ (1 where all have the same tree, else B), N nodes, P slots, T nodes of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfspec.cache.tree_block import TreeBlock

if TYPE_CHECKING:
    from selfspec.decoding.rows import Rows


@dataclass(frozen=True)
class TreeLayout:
    """The trees of all rows."""

    slots_RN: Tensor  # int64: of each node
    depths_RN: Tensor
    seen_RNP: Tensor  # bool: the slots of a node's ancestors, and its own
    slot_depths_RP: Tensor  # of what stands in each slot

    @property
    def num_slots(self) -> int:
        return self.seen_RNP.shape[2]


def block_of(
    rows: Rows, slots_RT: Tensor, depths_RT: Tensor, seen_RTP: Tensor, slot_depths_RP: Tensor, behind: int = 0
) -> tuple[Tensor, TreeBlock]:
    """Positions `[B, T]` of a pass over nodes in these slots, and what they see; slots of −1 take no part.

    behind: by how much a cache lags behind the target's (a draft that reads the token after each position has what
    stands in slot s at position length + s − 1, and no root).
    """
    B, first_B1 = rows.num_rows, rows.lengths_B[:, None] - behind
    takes_part_BT = rows.active_B[:, None] & (slots_RT >= 0)
    positions_BT = torch.where(takes_part_BT, first_B1 + depths_RT, -1)
    slots_BT = torch.where(takes_part_BT, first_B1 + slots_RT, -1)
    own = slice(behind, None)  # with `behind`, the root has no slot in this cache: its place is the row's last token
    slot_positions_BP = (first_B1 + slot_depths_RP)[:, own]
    return positions_BT, TreeBlock(slots_BT, rows.lengths_B, slot_positions_BP, seen_RTP[..., own].expand(B, -1, -1))
