"""What the queries of a pass may look at, as additive masks.

In a plain sequence, whether position p sees slot s depends on s − p alone: every query's mask is a cut from one line of
zeros and −inf, and a pass gathers its cuts in one kernel: a draft step on a CPU is so short that launching more shows.
Among the nodes of a tree there is no such line: see `TreeBlock`.

Cost: 2 S numbers for each kind of window.

Shape letters: B rows, T positions in this pass, S slots, R query heads per kv head, N = B*R*T.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.cache.tree_block import TreeBlock


class Masks:
    """Of a cache with `num_slots` slots per row. Its lines are made when they are first asked for, and stay."""

    def __init__(self, num_slots: int, device: torch.device | str) -> None:
        self._slot_ids_S = torch.arange(num_slots, device=device)
        self._lines: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def make(
        self,
        positions_BT: Tensor,
        extent: int,
        window: int | None,
        repeats: int,
        dtype: torch.dtype,
        tree: TreeBlock | None = None,
    ) -> Tensor:
        """`[B, 1, R*T, extent]`: 0 where slot <= position (and > position − window), −inf elsewhere."""
        rows, width = positions_BT.shape
        if tree is None:
            starts_BT = len(self._slot_ids_S) - 1 - positions_BT
            starts_N = starts_BT[:, None].expand(-1, repeats, -1).reshape(-1)
            mask = self._line(window, dtype).unfold(0, extent, 1).index_select(0, starts_N)
        else:
            hidden_BTS = tree.hidden_BTS(positions_BT, self._slot_ids_S[:extent], window)
            mask_BTS = torch.zeros(hidden_BTS.shape, dtype=dtype, device=hidden_BTS.device)
            mask_BTS.masked_fill_(hidden_BTS, -torch.inf)
            mask = mask_BTS[:, None].expand(-1, repeats, -1, -1)
        return mask.reshape(rows, 1, repeats * width, extent)

    def _line(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """`[2S − 1]`, from s − p = 1 − S to S − 1: position p's mask begins S − 1 − p from its start."""
        if (window, dtype) not in self._lines:
            behind = torch.arange(1 - len(self._slot_ids_S), len(self._slot_ids_S), device=self._slot_ids_S.device)
            hidden = behind > 0 if window is None else (behind > 0) | (behind <= -window)
            line = torch.zeros(len(behind), dtype=dtype, device=behind.device).masked_fill_(hidden, -torch.inf)
            self._lines[window, dtype] = line
        return self._lines[window, dtype]
