"""The paged cache holds what the contiguous one holds, in fewer blocks, and no row ever sees another one's writing."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from selfspec.cache import KVCache, LayerShape, Paged, PagedKVCache, kv_bytes_per_slot, make_cache
from selfspec.errors import UserError

SHAPES = [LayerShape(2, 4), LayerShape(3, 8)]


def paged(rows=2, capacity=100, block_size=16, num_blocks=20):
    return PagedKVCache(SHAPES, rows, capacity, torch.float32, "cpu", block_size, num_blocks)


def filled(pass_, seed=0):
    """Write random keys and values of every layer through a pass; returns what layer 1 may see."""
    generator = torch.Generator().manual_seed(seed)
    for layer, shape in enumerate(SHAPES):
        size = (*pass_.positions_BT.shape, 2 * shape.num_kv_heads, shape.head_dim)
        seen = pass_.write(layer, torch.randn(size, generator=generator))
    return seen


def test_bytes_are_what_the_formula_says():
    cache = PagedKVCache(SHAPES, 3, 100, torch.bfloat16, "cpu", block_size=16, num_blocks=7)
    assert cache.kv_bytes == 8 * 16 * kv_bytes_per_slot(SHAPES, torch.bfloat16)
    assert cache.total_slots == 8 * 16 == Paged(16).total_slots(3, [30, 40, 20])
    pointers = {layer.untyped_storage().data_ptr() for layer in cache.layers}
    assert pointers == {cache.storage.untyped_storage().data_ptr()}, "one allocation for all layers"


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_a_pass_reads_back_exactly_what_it_reads_from_the_contiguous_cache(block_size):
    ours = paged(capacity=150, block_size=block_size, num_blocks=400 // block_size)
    theirs = KVCache(SHAPES, 2, 150, torch.float32, "cpu")
    lengths = [0, 0]
    for row, prompt in [(1, 70), (0, 3)]:
        ours.place(row, [], 150)
        ours.reserve(row, 0, prompt)
        positions = torch.arange(prompt)[None]
        for cache in (ours, theirs):
            filled(cache.open(positions, prompt, rows=slice(row, row + 1)), seed=row)
        lengths[row] = prompt
    for step in range(12):
        positions = torch.tensor(lengths)[:, None] + torch.arange(5)
        positions[0] = -1 if step == 7 else positions[0]  # an idle row
        for row in range(2):
            ours.reserve(row, lengths[row], lengths[row] + 5)
        extent = max(lengths) + 5
        seen = [filled(cache.open(positions, extent), seed=9 + step) for cache in (ours, theirs)]
        masks = [cache.open(positions, extent).mask(None, 2, torch.float32) for cache in (ours, theirs)]
        assert torch.equal(*masks)
        for mine, other in zip(*seen, strict=True):
            assert mine.shape == other.shape == (2, 3, -(-extent // 64) * 64, 8)
            for row in range(2):
                end = lengths[row] + (0 if step == 7 and row == 0 else 5)
                assert torch.equal(mine[row, :, :end], other[row, :, :end])
        for row in range(1 if step == 7 else 0, 2):  # keep one, two, three, four of five
            lengths[row] += 1 + (step + row) % 4
            ours.trim(row, lengths[row])


def test_nothing_is_written_where_nobody_reserved():
    cache = paged()
    for row in range(2):
        cache.place(row, [], 100)
        cache.reserve(row, 0, 10)
    filled(cache.open(torch.tensor([[0, 1, -1], [9, -1, -1]]), extent=10))
    used = {block for row in cache.blocks.rows for block in row.blocks}
    blocks = cache.layers[1].view(-1, 16, 6, 8)
    live = {(cache.blocks.rows[0].blocks[0], 0), (cache.blocks.rows[0].blocks[0], 1)}
    live.add((cache.blocks.rows[1].blocks[0], 9))
    written = {tuple(index) for index in blocks.abs().sum((2, 3)).nonzero().tolist()}
    assert written == live | {(0, 0)} and 0 not in used, "padding lands in the block that belongs to nobody"


def test_a_shared_prefix_is_read_by_both_rows_and_written_by_neither():
    cache = paged(block_size=4)
    prompt = list(range(10))
    assert cache.place(0, prompt, 30) == 0
    filled(cache.open(torch.arange(10)[None], 10, rows=slice(0, 1)), seed=1)
    cache.publish(0, prompt)
    in_use = cache.blocks.num_in_use
    assert cache.place(1, prompt, 30) == 10
    assert cache.blocks.num_in_use == in_use, "the second row costs nothing yet"
    keys, values = cache.visible(1, slice(None), 64)
    assert torch.equal(keys[0, :, :10], keys[1, :, :10]) and torch.equal(values[0, :, :10], values[1, :, :10])

    before = keys[:, :, :10].clone()
    filled(cache.open(torch.arange(10)[None], 10, rows=slice(1, 2)), seed=2)  # runs the prompt again all the same
    assert torch.equal(cache.visible(1, slice(None), 64)[0][:, :, :10], before), "what is shared is read-only"

    cache.reserve(1, 10, 14)
    assert cache.blocks.num_copies == 1 and cache.blocks.num_in_use == in_use + 2
    filled(cache.open(torch.tensor([[-1] * 4, [10, 11, 12, 13]]), 14), seed=3)
    after = cache.visible(1, slice(None), 64)[0]
    assert torch.equal(after[:, :, :10], before), "the copy holds what the shared block held"
    assert after[1, :, 10:14].abs().min() > 0 and after[0, :, 10:12].abs().max() == 0, "and the other row sees nothing"


def test_the_isolation_test_notices_a_write_into_a_shared_block(monkeypatch):
    """Negative control: if no block is ever copied, the other row sees what it should not."""
    reserve = type(paged().blocks).reserve

    def in_place(pool, row, first, end):
        table = list(pool.rows[row].blocks)
        reserve(pool, row, first, end)
        pool.rows[row].blocks[: len(table)] = table
        return []

    monkeypatch.setattr("selfspec.cache.blocks.BlockPool.reserve", in_place)
    with pytest.raises(AssertionError):
        test_a_shared_prefix_is_read_by_both_rows_and_written_by_neither()


def test_a_released_rows_table_points_to_nothing_and_its_blocks_serve_the_next_row():
    cache = paged(rows=2, num_blocks=4)
    cache.place(0, [5] * 40, 60)
    cache.publish(0, [5] * 40)
    assert cache.table_BN[0].count_nonzero() == 3 and cache.blocks.num_free == 1
    cache.release(0, [5] * 45)
    assert cache.table_BN.count_nonzero() == 0 and cache.blocks.num_free == 4
    assert cache.place(1, [5] * 40 + [6], 60) == 40
    assert cache.table_BN[1].count_nonzero() == 3
    assert cache.table_BN[1].tolist()[:3] == cache.blocks.rows[1].blocks


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Paged(block_size=24), "block_size=24 is not possible: allowed are 1, 2, 4, 8, 16, 32 and 64"),
        (lambda: Paged(block_size=0), "block_size=0"),
        (lambda: Paged(num_blocks=0), "num_blocks=0 is not possible: allowed is 1 or more"),
        (lambda: Paged(16, 3).blocks_for(1, [20, 49]), "49 tokens .* needs 4 blocks of 16; there are 3.* up to 48"),
    ],
)
def test_what_is_not_possible_is_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_blocks_are_enough_for_the_longest_requests_side_by_side():
    assert Paged(16).blocks_for(2, [16, 17, 100, 1]) == 7 + 2
    cache = make_cache(Paged(16), SHAPES, 2, [16, 17, 100, 1], torch.float32, "cpu")
    assert cache.kv_bytes == (7 + 2 + 1) * 16 * kv_bytes_per_slot(SHAPES, torch.float32)


def test_the_arithmetic_needs_no_torch():
    code = "import sys, selfspec.cache.blocks, selfspec.cache.storage; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
