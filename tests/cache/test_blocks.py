"""The allocator: nothing leaks, nobody writes what others hold, and a row that was let in never runs out of blocks."""

from __future__ import annotations

import random

import pytest

from selfspec.cache.blocks import BlockPool
from selfspec.errors import UserError

SIZE = 4


def check(pool: BlockPool) -> None:
    """What must hold after every operation."""
    held = [block for row in pool.rows for block in row.blocks]
    assert all(len(set(row.blocks)) == len(row.blocks) for row in pool.rows)
    assert pool.num_holders == [held.count(block) for block in range(pool.num_blocks + 1)]
    assert pool.num_in_use == len(set(held)) and pool.num_saved == len(held) - len(set(held))
    free = [*pool._blank, *pool._kept]
    assert sorted({*held, *free}) == list(range(1, pool.num_blocks + 1)) and len(free) == pool.num_free
    assert not set(held) & set(free)
    for block, content in pool._contents.items():
        assert content.block == block and 0 < len(content.token_ids) <= pool.block_size


def test_a_row_takes_blocks_as_it_grows_and_gives_back_whole_ones_on_rollback():
    pool = BlockPool(8, SIZE, num_rows=1)
    pool.place(0, [], 20)
    counts = []
    for first, end in [(0, 4), (4, 5), (5, 9), (9, 17)]:
        assert pool.reserve(0, first, end) == []
        counts.append(len(pool.rows[0].blocks))
    assert counts == [1, 2, 3, 5]
    before = list(pool.rows[0].blocks)
    assert pool.trim(0, 9) and pool.rows[0].blocks == before[:3], "the block that still holds a token stays"
    assert not pool.trim(0, 9)
    assert pool.num_free == 5 and pool.peak_in_use == 5
    pool.release(0)
    assert pool.num_free == 8
    check(pool)


def test_rows_share_whole_blocks_of_a_common_prefix_and_copy_the_one_they_diverge_in():
    pool = BlockPool(20, SIZE, num_rows=2)
    assert pool.place(0, list(range(10)), 16) == 0
    pool.reserve(0, 0, 10)
    pool.publish(0, list(range(10)))
    assert pool.place(1, [0, 1, 2, 3, 4, 5, 6, 7, 8, 99, 98], 16) == 9
    assert pool.rows[1].blocks == pool.rows[0].blocks and pool.num_in_use == 3 and pool.num_saved == 3
    shared = pool.rows[0].blocks[2]
    assert pool.reserve(1, 9, 11) == [(shared, pool.rows[1].blocks[2])]
    assert pool.rows[0].blocks[2] == shared != pool.rows[1].blocks[2]
    assert pool.rows[0].blocks[:2] == pool.rows[1].blocks[:2] and pool.num_in_use == 4
    assert pool.reserve(0, 10, 14) == [], "the last one to hold a block writes in place"
    check(pool)


def test_whoever_writes_first_gets_the_copy():
    pool = BlockPool(20, SIZE, num_rows=2)
    pool.place(0, [1, 2, 3, 4, 5], 16)
    pool.reserve(0, 0, 5)
    pool.publish(0, [1, 2, 3, 4, 5])
    assert pool.place(1, [1, 2, 3, 4, 5], 16) == 5
    shared = pool.rows[0].blocks[1]
    assert pool.reserve(0, 5, 7) == [(shared, pool.rows[0].blocks[1])]
    assert pool.reserve(1, 5, 7) == [] and pool.rows[1].blocks[1] == shared
    check(pool)


def test_a_different_prefix_is_never_shared_although_a_later_block_is_the_same():
    pool = BlockPool(20, SIZE, num_rows=2)
    pool.place(0, [1, 2, 3, 4, 5, 6, 7, 8], 8)
    pool.reserve(0, 0, 8)
    pool.publish(0, [1, 2, 3, 4, 5, 6, 7, 8])
    assert pool.match([9, 2, 3, 4, 5, 6, 7, 8]) == ([], 0)
    assert pool.match([5, 6, 7, 8]) == ([], 0)
    assert pool.match([1, 2, 3, 4, 9, 6])[1] == 4
    assert pool.match([1, 2, 9])[1] == 2


def test_what_a_finished_row_held_is_found_until_its_blocks_are_needed_and_then_not():
    pool = BlockPool(4, SIZE, num_rows=1)
    pool.place(0, [1] * 8, 8)
    pool.reserve(0, 0, 8)
    pool.publish(0, [1] * 8)
    pool.release(0)
    assert pool.num_free == 4
    assert pool.match([1] * 8)[1] == 8
    pool.place(0, [2] * 12, 12)
    pool.reserve(0, 0, 12)  # takes the two blank blocks and the less useful of the two kept ones
    assert pool.match([1] * 8)[1] == 4
    pool.release(0)
    pool.forget()
    assert pool.match([1] * 8)[1] == 0
    check(pool)


def test_writing_into_kept_contents_ends_them():
    """A new prompt that shares three tokens of a finished one goes on in the same block."""
    pool = BlockPool(4, SIZE, num_rows=1)
    pool.place(0, [1, 2, 3, 4], 4)
    pool.reserve(0, 0, 4)
    pool.publish(0, [1, 2, 3, 4])
    pool.release(0)
    assert pool.place(0, [1, 2, 3, 9], 4) == 3
    assert pool.reserve(0, 3, 4) == []
    assert pool.match([1, 2, 3, 4])[1] == 3, "the fourth token is being overwritten"
    check(pool)


def test_a_prompt_inside_a_longer_shared_one_takes_nothing_away_from_it():
    pool = BlockPool(8, SIZE, num_rows=2)
    pool.place(0, [1, 2, 3, 4], 8)
    pool.reserve(0, 0, 4)
    pool.publish(0, [1, 2, 3, 4])
    assert pool.place(1, [1, 2], 8) == 2
    pool.publish(1, [1, 2])
    assert pool.match([1, 2, 3, 4])[1] == 4


def test_a_request_comes_in_only_if_all_rows_can_still_grow_to_their_full_length():
    pool = BlockPool(6, SIZE, num_rows=3)
    assert pool.fits([], 24) and not pool.fits([], 25)
    pool.place(0, [], 16)  # may need 4 of 6, holds none yet
    assert pool.num_free == 6
    assert pool.fits([], 8) and not pool.fits([], 9)
    pool.place(1, [], 8)
    assert not pool.fits([], 1)
    pool.reserve(0, 0, 16)
    pool.reserve(1, 0, 8)
    assert pool.num_free == 0
    with pytest.raises(UserError, match="All 6 blocks of 4 tokens are in use"):
        pool.reserve(1, 8, 9)


def test_shared_blocks_let_more_rows_in_and_the_copies_they_will_need_are_counted():
    pool = BlockPool(7, SIZE, num_rows=3)
    prompt = list(range(10))
    pool.place(0, prompt, 12)
    pool.reserve(0, 0, 10)
    pool.publish(0, prompt)
    assert pool.fits(prompt, 16), "3 held + 1 copy + 1 more: 5 of 7"
    assert pool.fits(prompt, 24) and not pool.fits(prompt, 25)
    pool.place(1, prompt, 24)
    assert pool.still_promised() == 3 + 1
    pool.reserve(0, 10, 12)
    assert pool.still_promised() == 3, "the copy was made by the other row, and one is enough for two"
    check(pool)


def live(seed: int) -> tuple[int, int, int]:
    """Random prompts with common beginnings, drafts, rollbacks, ends and new beginnings, with hardly enough blocks.

    Returns how many tokens were shared, how often a request had to wait, and how many blocks were copied.
    """
    rng = random.Random(seed)
    num_rows, size = rng.choice([1, 2, 5]), rng.choice([1, 4, 16])
    pool = BlockPool(rng.choice([8, 12, 30]), size, num_rows)
    stored: dict[tuple[int, int], object] = {}  # what a real cache would hold: (block, slot) -> token prefix
    texts: list[list[int]] = [[] for _ in range(num_rows)]
    limits = [0] * num_rows
    shared = waited = 0

    def write(row: int, first: int, end: int, text: list[int]) -> None:
        for source, copy in pool.reserve(row, first, end):
            for slot in range(size):
                stored[copy, slot] = stored.get((source, slot))
        for position in range(first, end):
            block = pool.rows[row].blocks[position // size]
            assert pool.num_holders[block] == 1, "a block that two rows hold is written"
            stored[block, position % size] = tuple(text[: position + 1])

    def read(row: int) -> None:
        for position in range(len(texts[row])):
            block = pool.rows[row].blocks[position // size]
            assert stored[block, position % size] == tuple(texts[row][: position + 1])

    for _ in range(400):
        row = rng.randrange(num_rows)
        if not limits[row]:
            prompt = [rng.choice([0, 0, 0, 1]) for _ in range(rng.randrange(0, 20))]
            limit = len(prompt) + rng.randrange(1, 12)
            if pool.blocks_for(limit) > pool.num_blocks:
                continue
            if not pool.fits(prompt, limit):
                waited += 1
                assert any(limits), "an empty pool lets anyone in who fits into it"
                continue
            found = pool.place(row, prompt, limit)
            shared += found
            texts[row], limits[row] = prompt, limit
            write(row, found, len(prompt), prompt)
            pool.publish(row, prompt)
        elif len(texts[row]) < limits[row]:
            drafted = min(rng.randrange(1, 6), limits[row] - len(texts[row]))
            text = texts[row] + [rng.randrange(2) for _ in range(drafted)]
            write(row, len(texts[row]), len(text), text)
            texts[row] = text[: len(texts[row]) + rng.randrange(0, drafted + 1)]
            pool.trim(row, len(texts[row]))
        else:
            pool.publish(row, texts[row])
            pool.release(row)
            texts[row], limits[row] = [], 0
        check(pool)
        for other in range(num_rows):
            read(other)
    return shared, waited, pool.num_copies


def test_random_lives_of_rows_keep_the_books_balanced_and_never_run_out():
    shared, waited, copied = map(sum, zip(*(live(seed) for seed in range(30)), strict=True))
    assert shared > 1000 and waited > 100 and copied > 100, "the test met what it is about"


def test_the_random_test_notices_a_block_that_is_not_copied(monkeypatch):
    """Negative control: without copy on write, some row writes into what another one holds."""

    def without_copies(self, row, first, end):
        held = self.rows[row]
        held.next_write = max(first, held.next_write)
        while len(held.blocks) * self.block_size < end:
            held.blocks.append(self._take())
        return []

    monkeypatch.setattr(BlockPool, "reserve", without_copies)
    caught = 0
    for seed in range(30):
        try:
            live(seed)
        except AssertionError:
            caught += 1
    assert caught > 5
