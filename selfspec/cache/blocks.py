"""Which block of memory belongs to which row: a free list, one block table per row, and blocks that rows share.

A block holds `block_size` consecutive tokens of a row. Rows whose prompts begin alike share the blocks of what they
have in common, found in a trie of block contents; a block that more than one row holds is never written: the writer
gets a copy (Kwon et al. 2023, "PagedAttention", section 4). What a finished row held stays findable until its blocks
are needed for something else, oldest first.

A row is let in only if it can be finished: `fits` counts what every row may still take, up to the length it was placed
with, so rows never run out of blocks half way. No torch here, and nothing is stored here: block numbers only. Block 0
belongs to nobody; padding is written there.

Cost: a few list operations per row and round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from selfspec.errors import UserError

TRASH = 0


@dataclass(eq=False)
class Content:
    """What a block holds: these tokens (at most `block_size`), after everything its parents hold."""

    block: int
    token_ids: tuple[int, ...]
    parent: Content | None
    children: dict[tuple[int, ...], Content] = field(default_factory=dict)


@dataclass
class RowBlocks:
    """The blocks of one row, in order of position."""

    blocks: list[int] = field(default_factory=list)
    next_write: int = 0  # no position before this one is written again
    promised: int = 0  # blocks the row may come to hold


class BlockPool:
    """`num_blocks` blocks, numbered from 1, for `num_rows` rows."""

    def __init__(self, num_blocks: int, block_size: int, num_rows: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.rows = [RowBlocks() for _ in range(num_rows)]
        self.num_holders = [0] * (num_blocks + 1)
        self.num_copies = 0
        self.peak_in_use = 0
        self._blank = list(range(num_blocks, 0, -1))  # free, nothing worth finding in them; a stack
        self._kept: dict[int, Content] = {}  # free, but contents may still be shared; oldest first
        self._root = Content(TRASH, (), None)
        self._contents: dict[int, Content] = {}

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._kept)

    @property
    def num_in_use(self) -> int:
        """Blocks that at least one row holds; shared ones count once."""
        return self.num_blocks - self.num_free

    @property
    def num_saved(self) -> int:
        """How many more blocks there would be in use if rows shared none."""
        return sum(len(row.blocks) for row in self.rows) - self.num_in_use

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, token_ids: Sequence[int]) -> tuple[list[int], int]:
        """The blocks that hold the longest known prefix of these tokens, and its length. The last may match in part."""
        node, blocks, size = self._root, [], self.block_size
        for first in range(0, len(token_ids), size):
            chunk = tuple(token_ids[first : first + size])
            if len(chunk) == size and chunk in node.children:
                node = node.children[chunk]
                blocks.append(node.block)
                continue
            best, count = None, 0
            for child in node.children.values():
                if (common := common_prefix(child.token_ids, chunk)) > count:
                    best, count = child, common
            return (blocks, first) if best is None else ([*blocks, best.block], first + count)
        return blocks, len(token_ids)

    def fits(self, token_ids: Sequence[int], num_tokens: int) -> bool:
        """Whether a row with this prompt could grow to `num_tokens` without ever waiting for another one to finish."""
        blocks, length = self.match(token_ids)
        idle = sum(self.num_holders[block] == 0 for block in blocks)  # shared, but nobody holds them now
        copies = int(length % self.block_size != 0 and self.num_holders[blocks[-1]] > 0)
        needed = self.blocks_for(num_tokens) - len(blocks) + idle + copies
        return self.num_free - self.still_promised() >= needed

    def still_promised(self) -> int:
        """Blocks that the rows may still take: up to their promised length, and for every copy before a write."""
        writers = Counter(block for row in self.rows if (block := self._shared_at_write(row)) is not None)
        copies = sum(count - (count == self.num_holders[block]) for block, count in writers.items())
        return copies + sum(max(row.promised - len(row.blocks), 0) for row in self.rows)

    def place(self, row: int, token_ids: Sequence[int], num_tokens: int) -> int:
        """Give an empty row the blocks that hold a prefix of its prompt; it may grow to `num_tokens`.

        Returns the length of that prefix: positions before it are not written by this row.
        """
        assert not self.rows[row].blocks, "release the row first"
        blocks, length = self.match(token_ids)
        for block in blocks:
            self._hold(block)
        self.rows[row] = RowBlocks(blocks, length, self.blocks_for(num_tokens))
        return length

    def reserve(self, row: int, first: int, end: int) -> list[tuple[int, int]]:
        """Make positions [first, end) of a row writable, taking blocks as needed; what was reserved stays so.

        Returns the pairs (from, to) of blocks to be copied before anything is written. Raises UserError when there is
        no block left, which cannot happen to rows that were let in by `fits`.
        """
        held, size = self.rows[row], self.block_size
        first = held.next_write = max(first, held.next_write)
        copies = []
        for index in range(first // size, min(self.blocks_for(end), len(held.blocks))) if first < end else ():
            block = held.blocks[index]
            if self.num_holders[block] > 1:
                held.blocks[index] = self._take()
                self._drop(block)
                copies.append((block, held.blocks[index]))
            else:
                self._keep_only(block, first - index * size)
        while len(held.blocks) * size < end:
            held.blocks.append(self._take())
        self.num_copies += len(copies)
        return copies

    def trim(self, row: int, length: int) -> bool:
        """Free the whole blocks behind a row's `length` tokens (rejected drafts); says whether there were any."""
        held = self.rows[row]
        held.next_write = max(held.next_write, length)
        blocks, keep = held.blocks, self.blocks_for(length)
        behind = blocks[keep:]
        del blocks[keep:]
        for block in behind:
            self._drop(block)
        return bool(behind)

    def publish(self, row: int, token_ids: Sequence[int]) -> None:
        """The row's first tokens, written for good: other rows may share them from now on."""
        held, node, size = self.rows[row], self._root, self.block_size
        held.next_write = max(held.next_write, len(token_ids))
        for index in range(self.blocks_for(len(token_ids))):
            chunk = tuple(token_ids[index * size : (index + 1) * size])
            if chunk not in node.children:
                block = held.blocks[index]
                known = self._contents.get(block)
                if known is not None and known.parent is node and known.token_ids[: len(chunk)] == chunk:
                    return  # shared from a row that has more in it
                self._forget(block)  # a shorter beginning of the same contents, or contents nobody can find any more
                node.children[chunk] = self._contents[block] = Content(block, chunk, node)
            node = node.children[chunk]

    def release(self, row: int) -> None:
        """The row is done: its blocks are free, the last ones first to be used again."""
        for block in reversed(self.rows[row].blocks):
            self._drop(block)
        self.rows[row] = RowBlocks()

    def forget(self) -> None:
        """Nothing that was published is found any more."""
        self._blank += self._kept
        self._kept, self._contents, self._root = {}, {}, Content(TRASH, (), None)

    def _shared_at_write(self, row: RowBlocks) -> int | None:
        """The block the row writes next, if another row holds it too."""
        index = row.next_write // self.block_size
        shared = index < len(row.blocks) and self.num_holders[row.blocks[index]] > 1
        return row.blocks[index] if shared else None

    def _take(self) -> int:
        if self._blank:
            block = self._blank.pop()
        elif self._kept:
            block = next(iter(self._kept))
            self._forget(block)
        else:
            raise UserError(
                f"All {self.num_blocks} blocks of {self.block_size} tokens are in use. Allow more blocks or fewer rows."
            )
        self._hold(block)
        return block

    def _hold(self, block: int) -> None:
        self._kept.pop(block, None)
        self.num_holders[block] += 1
        self.peak_in_use = max(self.peak_in_use, self.num_in_use)

    def _drop(self, block: int) -> None:
        self.num_holders[block] -= 1
        if self.num_holders[block] == 0:
            if block in self._contents:
                self._kept[block] = self._contents[block]
            else:
                self._blank.append(block)

    def _keep_only(self, block: int, count: int) -> None:
        """Before a block is written from its slot `count` on: what it is known to hold ends there."""
        content = self._contents.get(block)
        if content is None or len(content.token_ids) <= count:
            return
        self._forget(block)
        beginning, parent = content.token_ids[: max(count, 0)], content.parent
        if beginning and parent is not None and beginning not in parent.children:
            parent.children[beginning] = self._contents[block] = Content(block, beginning, parent)

    def _forget(self, block: int) -> None:
        """The contents of this block, and whatever follows them, are not found any more."""
        content = self._contents.pop(block, None)
        self._kept.pop(block, None)
        if content is not None and content.parent is not None:
            content.parent.children.pop(content.token_ids, None)


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many first tokens two sequences have in common."""
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count
