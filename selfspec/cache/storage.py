"""How keys and values are stored, as arithmetic: what one token takes, and how many token slots a call needs.

Two ways. `Contiguous`: every row has one stretch of slots, as long as the longest request. `Paged`: blocks of a few
tokens, taken as rows grow. Which one is chosen never changes a token, only the memory. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from selfspec.config import allowed
from selfspec.errors import UserError

if TYPE_CHECKING:
    import torch

EXTENT_STEP = 64  # attention reads the valid slots rounded up to this: few shapes, little waste


@dataclass(frozen=True)
class LayerShape:
    """What one layer stores per token: keys and values of `num_kv_heads * head_dim` numbers each."""

    num_kv_heads: int
    head_dim: int


def kv_bytes_per_slot(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Bytes that one token occupies over all layers: 2 (keys, values) * Σ G*D * itemsize."""
    return 2 * sum(shape.num_kv_heads * shape.head_dim for shape in shapes) * dtype.itemsize


@dataclass(frozen=True)
class Chunks:
    """How a prompt is run: at most `most` tokens at once, and `between_rounds` where other rows wait for their next
    round, padded to a multiple of `step`.
    """

    most: int
    between_rounds: int
    step: int

    def padded(self, num_tokens: int) -> int:
        return -(-num_tokens // self.step) * self.step


# A GPU needs hundreds of tokens to be busy, and few shapes. On a CPU a token of padding costs as much as any other;
# more tokens at once are cheaper, each of them, but keep the other rows waiting.
CHUNKS = Chunks(most=512, between_rounds=512, step=64)
CHUNKS_CPU = Chunks(most=512, between_rounds=128, step=16)


def prompt_chunks(on_cpu: bool) -> Chunks:
    return CHUNKS_CPU if on_cpu else CHUNKS


def slots_for(capacity: int) -> int:
    """Slots of a row of at most `capacity` tokens: one more for padding, rounded up to `EXTENT_STEP`."""
    return -(-(capacity + 1) // EXTENT_STEP) * EXTENT_STEP


@dataclass(frozen=True)
class Contiguous:
    """One stretch of slots per row."""

    def total_slots(self, num_rows: int, needs: Sequence[int]) -> int:
        """Token slots of `num_rows` rows, for requests of these lengths (prompt, output and one round)."""
        return num_rows * slots_for(max(needs))


@dataclass(frozen=True)
class Paged:
    """Blocks of `block_size` tokens, which rows with a common prompt prefix share.

    num_blocks None: enough for the longest requests to run side by side. Fewer make requests wait for one another.
    """

    block_size: int = 16
    num_blocks: int | None = None

    def __post_init__(self) -> None:
        if self.block_size < 1 or EXTENT_STEP % self.block_size:
            raise UserError(f"block_size={self.block_size} is not possible: allowed are 1, 2, 4, 8, 16, 32 and 64.")
        if self.num_blocks is not None and self.num_blocks < 1:
            raise UserError(f"num_blocks={self.num_blocks} is not possible: allowed is 1 or more.")

    def blocks_for(self, num_rows: int, needs: Sequence[int]) -> int:
        """Blocks for requests of these lengths. Raises UserError if one of them needs more than there may be."""
        blocks = sorted((-(-need // self.block_size) for need in needs), reverse=True)
        if self.num_blocks is None:
            return sum(blocks[:num_rows])
        if blocks[0] > self.num_blocks:
            raise UserError(
                f"A request of {max(needs)} tokens (prompt, output and one draft) needs {blocks[0]} blocks of "
                f"{self.block_size}; there are {self.num_blocks}. Allowed here: up to "
                f"{self.num_blocks * self.block_size} tokens, or num_blocks={blocks[0]} or more."
            )
        return self.num_blocks

    def total_slots(self, num_rows: int, needs: Sequence[int]) -> int:
        """Token slots of all blocks, the one for padding included."""
        return (self.blocks_for(num_rows, needs) + 1) * self.block_size


Storage = Contiguous | Paged
STORAGES: dict[str, Storage] = {"contiguous": Contiguous(), "paged": Paged()}


def storage_for(given: str | Storage) -> Storage:
    """ "contiguous", "paged" (blocks of 16, as many as are needed), or a `Paged` of your own. UserError otherwise."""
    if isinstance(given, Contiguous | Paged):
        return given
    if given not in STORAGES:
        raise UserError(f"cache={given!r} is unknown. {allowed(str(given), STORAGES)}")
    return STORAGES[given]
