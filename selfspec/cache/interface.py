"""What decoding asks of a cache, whatever its storage: contiguous slots per row, or blocks that rows share.

A row's life: `fits` (may it come in?), `place` (its prompt arrives; how much of it is there already?), `publish` (the
prompt has run), then per round `reserve` (make room for the pending token and the drafts), passes through `open`, and
`trim` (back to what was committed); at the end `release`. All of these are host arithmetic on a few integers.

Shape letters: B rows, T positions in this pass, S slots, G kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from selfspec.cache.contiguous import Pass
    from selfspec.cache.masks import Masks
    from selfspec.cache.tree_block import TreeBlock


class Cache(Protocol):
    """Keys and values of `num_rows` sequences of at most `num_slots` positions each."""

    num_rows: int
    num_slots: int  # per row, the width of everything that is kept per position
    between_rows: bool  # whether `place` may find tokens that another row has run
    layers: list[Tensor]  # per layer, what a pass writes into: [slots, 2G, D], keys first
    alike: list[Tensor]  # the same memory: of neighbouring layers of one shape, [L, slots, 2G*D]
    masks: Masks

    @property
    def kv_bytes(self) -> int:
        """Bytes allocated for keys and values."""

    @property
    def total_slots(self) -> int:
        """Tokens that could be stored at once, over all rows."""

    def visible(self, layer: int, rows: slice, extent: int) -> tuple[Tensor, Tensor]:
        """Keys and values of slots `[0, extent)` as `[B, G, extent, D]`."""

    def slots_of(self, positions_BT: Tensor, rows: slice = slice(None)) -> Tensor:
        """Where the keys and values of these positions lie in a layer; a slot that does not count for −1."""

    def open(
        self,
        positions_BT: Tensor,
        extent: int,
        rows: slice = slice(None),
        layer_offset: int = 0,
        tree: TreeBlock | None = None,
    ) -> Pass:
        """One forward pass over `positions_BT` (int64, −1 = padding) of `rows`, reading slots `[0, extent)`."""

    def fits(self, token_ids: Sequence[int], num_tokens: int) -> bool:
        """Whether a row with this prompt can come in now and grow to `num_tokens`."""

    def place(self, row: int, token_ids: Sequence[int], num_tokens: int, held: Sequence[int] = ()) -> int:
        """A prompt arrives in an idle row, which last held `held`; returns how many of its tokens are there already."""

    def reserve(self, row: int, first: int, end: int) -> None:
        """Positions [first, end) of a row are about to be written."""

    def trim(self, row: int, length: int) -> None:
        """What lies behind the first `length` tokens of a row is not needed any more."""

    def publish(self, row: int, token_ids: Sequence[int]) -> None:
        """These first tokens of a row are written for good."""

    def release(self, row: int, token_ids: Sequence[int]) -> None:
        """A row is done; its first tokens, as far as they may be of use to a later prompt."""

    def forget(self) -> None:
        """No later prompt may find anything of what was written so far."""
