"""Keys and values in blocks of a few tokens, so that a row takes memory as it grows and rows share what they have in
common.

One allocation of fixed-size blocks, laid out as in the contiguous cache: per layer `[blocks*block_size, 2G, D]` (keys,
then values). A table on the device says which block holds which stretch of a row; `BlockPool` decides that on the host.
Writing is the same single `index_copy_`, through the table. Reading gathers a row's blocks into one view, because the
attention of torch's CPU wants one tensor: a copy of the visible slots per layer and pass, which is what paging costs
there. CUDA kernels that read through a block table (`varlen_attn(block_table=...)`, flash-attn) take
`layers[i].unflatten(0, (-1, block_size))[:, :, :G]` and `table_BN` as they are.

Block 0 belongs to nobody: padding is written there, and table entries without a block point to it.

Cost: `(num_blocks + 1) * block_size * kv_bytes_per_slot(shapes)` bytes, plus the table; nothing moves, except a block
that is copied before a row writes into what it shares.

Shape letters: B rows, T positions in this pass, S slots, N blocks per row, P slots per block, G kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.cache.blocks import TRASH, BlockPool
from selfspec.cache.contiguous import KVCache, Pass, neighbours
from selfspec.cache.interface import Cache
from selfspec.cache.masks import Masks
from selfspec.cache.storage import EXTENT_STEP, LayerShape, Paged, Storage, slots_for
from selfspec.cache.tree_block import TreeBlock


class PagedKVCache:
    """Keys and values of `len(shapes)` layers for `rows` sequences of at most `capacity` tokens, in `num_blocks`
    blocks.
    """

    between_rows = True

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
        block_size: int,
        num_blocks: int,
    ) -> None:
        self.shapes = tuple(shapes)
        self.num_rows = rows
        self.capacity = capacity
        self.block_size = block_size
        self.num_slots = slots_for(capacity)
        self.blocks = BlockPool(num_blocks, block_size, rows)
        num_stored = (num_blocks + 1) * block_size
        per_layer = [2 * shape.num_kv_heads * shape.head_dim * num_stored for shape in self.shapes]
        self.storage = torch.zeros(sum(per_layer), dtype=dtype, device=device)
        self.layers: list[Tensor] = [  # per layer [blocks*P, 2G, D]
            chunk.view(num_stored, 2 * shape.num_kv_heads, shape.head_dim)
            for shape, chunk in zip(self.shapes, self.storage.split(per_layer), strict=True)
        ]
        self.alike = neighbours(self.storage, self.shapes, num_stored)
        self.table_BN = torch.full((rows, self.num_slots // block_size), TRASH, dtype=torch.int64, device=device)
        self.writable_from_B = torch.zeros(rows, dtype=torch.int64, device=device)
        self.masks = Masks(self.num_slots, device)

    @property
    def kv_bytes(self) -> int:
        return self.storage.numel() * self.storage.dtype.itemsize

    @property
    def total_slots(self) -> int:
        return (self.blocks.num_blocks + 1) * self.block_size

    def visible(self, layer: int, rows: slice, extent: int) -> tuple[Tensor, Tensor]:
        """Keys and values of slots `[0, extent)` as `[B, G, extent, D]`, gathered through the table."""
        table_BN = self.table_BN[rows, : extent // self.block_size]
        by_block = self.layers[layer].view(-1, self.block_size * self.layers[layer][0].numel())
        gathered = by_block.index_select(0, table_BN.reshape(-1))
        by_row = gathered.view(len(table_BN), extent, *self.layers[layer].shape[1:]).transpose(1, 2)
        keys, values = by_row.chunk(2, dim=1)
        return keys, values

    def slots_of(self, positions_BT: Tensor, rows: slice = slice(None)) -> Tensor:
        """As `KVCache.slots_of`. What a row shares is not written by it: those positions go where padding goes."""
        index_BT = positions_BT.clamp(min=0)
        blocks_BT = self.table_BN[rows].gather(1, index_BT // self.block_size)
        slots_BT = blocks_BT * self.block_size + index_BT % self.block_size
        return torch.where(positions_BT >= self.writable_from_B[rows, None], slots_BT, TRASH)

    def open(
        self,
        positions_BT: Tensor,
        extent: int,
        rows: slice = slice(None),
        layer_offset: int = 0,
        tree: TreeBlock | None = None,
    ) -> Pass:
        """As `KVCache.open`."""
        extent = min(-(-extent // EXTENT_STEP) * EXTENT_STEP, self.num_slots)
        slots_BT = self.slots_of(positions_BT if tree is None else tree.slots_BT, rows)
        return Pass(self, positions_BT.clamp(min=0), slots_BT.reshape(-1), extent, rows, layer_offset, tree)

    def fits(self, token_ids: Sequence[int], num_tokens: int) -> bool:
        return self.blocks.fits(token_ids, num_tokens)

    def place(self, row: int, token_ids: Sequence[int], num_tokens: int, held: Sequence[int] = ()) -> int:
        """Share what any row has run of this prompt, and make room for the rest of it."""
        shared = self.blocks.place(row, token_ids, num_tokens)
        self.writable_from_B[row].fill_(shared)
        self._show_table(row)
        self.reserve(row, shared, len(token_ids))
        return shared

    def reserve(self, row: int, first: int, end: int) -> None:
        """Blocks up to position `end`; a block that another row holds too is copied before this one writes there."""
        before = len(self.blocks.rows[row].blocks)
        copies = self.blocks.reserve(row, first, end)
        for source, copy in copies:
            for layer in self.layers:
                by_block = layer.unflatten(0, (-1, self.block_size))
                by_block[copy] = by_block[source]
        if copies or len(self.blocks.rows[row].blocks) > before:
            self._show_table(row)

    def trim(self, row: int, length: int) -> None:
        if self.blocks.trim(row, length):
            self._show_table(row)

    def publish(self, row: int, token_ids: Sequence[int]) -> None:
        self.blocks.publish(row, token_ids)

    def release(self, row: int, token_ids: Sequence[int]) -> None:
        self.blocks.publish(row, token_ids)
        self.blocks.release(row)
        self._show_table(row)

    def forget(self) -> None:
        self.blocks.forget()

    def _show_table(self, row: int) -> None:
        """Bring the device's table to what the host decided, in one small copy."""
        held = self.blocks.rows[row].blocks
        padded = held + [TRASH] * (self.table_BN.shape[1] - len(held))
        shown = torch.tensor(padded, dtype=torch.int64, pin_memory=self.table_BN.is_cuda)
        self.table_BN[row].copy_(shown, non_blocking=True)


def make_cache(
    storage: Storage,
    shapes: Sequence[LayerShape],
    rows: int,
    needs: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
) -> Cache:
    """A cache for requests of these lengths (prompt, output and one round), `rows` of them at a time."""
    if isinstance(storage, Paged):
        num_blocks = storage.blocks_for(rows, needs)
        return PagedKVCache(shapes, rows, max(needs), dtype, device, storage.block_size, num_blocks)
    return KVCache(shapes, rows, max(needs), dtype, device)
