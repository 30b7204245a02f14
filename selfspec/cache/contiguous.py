"""One preallocated key/value buffer for every layer of the target and of its draft.

Layout: one flat allocation, viewed per layer as `[B*S, 2G, D]` (keys, then values), slot `b*S + position` for row `b`.
Writing is one `index_copy_` whatever the number of rows; reading row `b` is a strided view, nothing is copied.
Rolling back is not an operation of the cache at all: a slot beyond a row's length is masked, and overwritten by the
next pass. The last slot of each row is *trash*: padding and finished rows write there, so that shapes never change.

Cost: `rows * slots * kv_bytes_per_slot(shapes)` bytes, once per run; `data_ptr` never changes.

Shape letters: B rows, T positions in this pass, S slots, G kv heads, R query heads per kv head, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor

from selfspec.cache.blocks import common_prefix
from selfspec.cache.interface import Cache
from selfspec.cache.masks import Masks
from selfspec.cache.storage import EXTENT_STEP, LayerShape, slots_for
from selfspec.cache.tree_block import TreeBlock

T = TypeVar("T")


class KVCache:
    """Keys and values of `len(shapes)` layers for `rows` sequences of at most `capacity` tokens."""

    between_rows = False

    def __init__(
        self, shapes: Sequence[LayerShape], rows: int, capacity: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.shapes = tuple(shapes)
        self.num_rows = rows
        self.capacity = capacity
        self.num_slots = slots_for(capacity)  # the last one is trash
        widths = [shape.num_kv_heads * shape.head_dim for shape in self.shapes]
        per_layer = [2 * width * rows * self.num_slots for width in widths]
        self.storage = torch.zeros(sum(per_layer), dtype=dtype, device=device)
        self.layers: list[Tensor] = [  # per layer [B*S, 2G, D]
            chunk.view(rows * self.num_slots, 2 * shape.num_kv_heads, shape.head_dim)
            for shape, chunk in zip(self.shapes, self.storage.split(per_layer), strict=True)
        ]
        self.alike = neighbours(self.storage, self.shapes, rows * self.num_slots)
        self._views: dict[tuple[int, int, int, int], tuple[Tensor, Tensor]] = {}
        self._row_starts_B1 = torch.arange(rows, device=device)[:, None] * self.num_slots
        self.masks = Masks(self.num_slots, device)

    @property
    def kv_bytes(self) -> int:
        return self.storage.numel() * self.storage.dtype.itemsize

    @property
    def total_slots(self) -> int:
        return self.num_rows * self.num_slots

    def visible(self, layer: int, rows: slice, extent: int) -> tuple[Tensor, Tensor]:
        """Keys and values of slots `[0, extent)` as `[B, G, extent, D]` views; made once, since nothing ever moves."""
        first, last, _ = rows.indices(self.num_rows)
        key = (layer, first, last, extent)
        if key not in self._views:
            by_row = self.layers[layer].unflatten(0, (self.num_rows, self.num_slots))[rows, :extent].transpose(1, 2)
            keys, values = by_row.chunk(2, dim=1)
            self._views[key] = (keys, values)
        return self._views[key]

    def slots_of(self, positions_BT: Tensor, rows: slice = slice(None)) -> Tensor:
        """Where the keys and values of these positions lie in a layer; the row's trash slot for −1."""
        starts_B1 = self._row_starts_B1[rows]
        return torch.where(positions_BT >= 0, starts_B1 + positions_BT, starts_B1 + (self.num_slots - 1))

    def open(
        self,
        positions_BT: Tensor,
        extent: int,
        rows: slice = slice(None),
        layer_offset: int = 0,
        tree: TreeBlock | None = None,
    ) -> Pass:
        """One forward pass over `positions_BT` (int64, −1 = padding) of `rows`, reading slots `[0, extent)`.

        `extent` must exceed every position in use (with a tree: every slot); it is rounded up to `EXTENT_STEP` and kept
        clear of the trash slot.
        """
        extent = min(-(-extent // EXTENT_STEP) * EXTENT_STEP, self.num_slots)
        slots_BT = self.slots_of(positions_BT if tree is None else tree.slots_BT, rows)
        return Pass(self, positions_BT.clamp(min=0), slots_BT.reshape(-1), extent, rows, layer_offset, tree)

    def reorder(self, rows_B: Tensor, extent: int) -> None:
        """Row b gets what row `rows_B[b]` held in slots `[0, extent)`; `rows_B` is a permutation. A copy per layer."""
        for layer in self.layers:
            by_row = layer.unflatten(0, (self.num_rows, self.num_slots))[:, :extent]
            by_row.copy_(by_row[rows_B])

    def fits(self, token_ids: Sequence[int], num_tokens: int) -> bool:
        return num_tokens <= self.capacity

    def place(self, row: int, token_ids: Sequence[int], num_tokens: int, held: Sequence[int] = ()) -> int:
        """What the row last held stays where it is, so a prompt that goes on from it finds it there."""
        return common_prefix(held, token_ids)

    def reserve(self, row: int, first: int, end: int) -> None:
        """A row has all its slots from the start; so the rest of a row's life is nothing to this cache either."""

    def trim(self, row: int, length: int) -> None: ...

    def publish(self, row: int, token_ids: Sequence[int]) -> None: ...

    def release(self, row: int, token_ids: Sequence[int]) -> None: ...

    def forget(self) -> None: ...


def neighbours(storage: Tensor, shapes: Sequence[LayerShape], num_stored: int) -> list[Tensor]:
    """Views `[L, slots, 2G*D]` of layers that lie one after the other and have the same shape: mostly one of all."""
    views, first = list[Tensor](), 0
    for shape, group in groupby(shapes):
        width, count = 2 * shape.num_kv_heads * shape.head_dim, len(list(group))
        end = first + count * num_stored * width
        views.append(storage[first:end].view(count, num_stored, width))
        first = end
    return views


@dataclass
class Pass:
    """Where one forward pass writes and what it sees. Computed once, used by every layer.

    It is what a transformers attention layer is handed as its cache: `update` stores this pass's keys and values and
    returns everything the pass may attend to; `mask` hides the slots that lie after each query (or before its window).
    """

    cache: Cache
    positions_BT: Tensor  # int64, >= 0
    slots_N: Tensor  # int64 [B*T], flat write index
    extent: int
    rows: slice
    layer_offset: int = 0
    tree: TreeBlock | None = None
    _memo: dict[object, Any] = field(default_factory=dict)

    def update(
        self, keys_BGTD: Tensor, values_BGTD: Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """What transformers' attention calls: `write`, with the head dimension in front of the tokens."""
        return self.write(layer_idx, torch.cat([keys_BGTD, values_BGTD], 1).transpose(1, 2))

    def write(self, layer_idx: int, kv_BTXD: Tensor) -> tuple[Tensor, Tensor]:
        """Write this pass's keys and values (`[B, T, 2G, D]`, keys first); return what the pass may attend to."""
        layer = layer_idx + self.layer_offset
        buffer = self.cache.layers[layer]
        buffer.index_copy_(0, self.slots_N, kv_BTXD.flatten(0, 1))
        return self.cache.visible(layer, self.rows, self.extent)

    def once(self, key: object, make: Callable[[], T]) -> T:
        """`make()` the first time a layer of this pass asks for `key`, the same object afterwards."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    def mask(self, window: int | None, repeats: int, dtype: torch.dtype) -> Tensor:
        """Additive mask `[B, 1, R*T, extent]`: 0 where slot <= position (and > position − window), −inf elsewhere.

        Never `None`: with more than one query on a preallocated cache, no mask is silently wrong.
        """
        make = self.cache.masks.make
        return self.once(
            (window, repeats, dtype), lambda: make(self.positions_BT, self.extent, window, repeats, dtype, self.tree)
        )
