"""The cache: one allocation of exactly the stated size, padding that lands nowhere, rows that do not see each other."""

from __future__ import annotations

import pytest
import torch

from selfspec.cache import KVCache, LayerShape, kv_bytes_per_slot

SHAPES = [LayerShape(2, 4), LayerShape(3, 8)]


def test_bytes_are_what_the_formula_says():
    cache = KVCache(SHAPES, rows=3, capacity=100, dtype=torch.bfloat16, device="cpu")
    assert cache.num_slots == 128
    assert kv_bytes_per_slot(SHAPES, torch.bfloat16) == 2 * (2 * 4 + 3 * 8) * 2
    assert cache.kv_bytes == 3 * 128 * kv_bytes_per_slot(SHAPES, torch.bfloat16)
    pointers = {layer.untyped_storage().data_ptr() for layer in cache.layers}
    assert pointers == {cache.storage.untyped_storage().data_ptr()}, "one allocation for all layers"


def test_written_tokens_are_read_back_per_row_and_padding_lands_in_the_trash_slot():
    cache = KVCache(SHAPES, rows=2, capacity=100, dtype=torch.float32, device="cpu")
    positions = torch.tensor([[0, 1, -1], [5, -1, -1]])
    pass_ = cache.open(positions, extent=6)
    fresh = torch.randn(2, 3, 3, 8)  # [B, G, T, D] of layer 1
    keys, values = pass_.update(fresh, -fresh, 1)
    assert keys.shape == (2, 3, 64, 8)
    assert torch.equal(keys[0, :, :2], fresh[0, :, :2]) and torch.equal(values[1, :, 5], -fresh[1, :, 0])
    live = torch.zeros(2, 128, dtype=torch.bool)
    live[0, :2] = live[1, 5] = True
    by_row = cache.layers[1].unflatten(0, (2, 128))
    assert by_row[:, :-1][~live[:, :-1]].abs().max() == 0, "nothing but the trash slot holds padding"
    assert cache.layers[0].abs().max() == 0, "other layers are untouched"


@pytest.mark.parametrize("window", [None, 2])
def test_the_mask_shows_what_lies_before_and_inside_the_window(window):
    cache = KVCache(SHAPES, rows=1, capacity=60, dtype=torch.float32, device="cpu")
    mask = cache.open(torch.tensor([[3, 4]]), extent=5).mask(window, 2, torch.float32)
    assert mask.shape == (1, 1, 4, 64)  # T=2, repeated for 2 query heads per kv head
    for row, position in enumerate([3, 4, 3, 4]):
        seen = [slot for slot in range(64) if mask[0, 0, row, slot] == 0]
        assert seen == list(range(0 if window is None else position - window + 1, position + 1))


@pytest.mark.parametrize("window", [None, 1, 7, 500])
def test_every_mask_is_what_its_definition_says_from_the_first_slot_to_the_last(window):
    cache = KVCache(SHAPES, rows=2, capacity=150, dtype=torch.float32, device="cpu")
    positions = torch.tensor([[0, 5, 62], [100, -1, cache.num_slots - 1]])
    for extent in (64, cache.num_slots):
        mask = cache.open(positions, extent).mask(window, 3, torch.bfloat16)
        behind = positions.clamp(min=0)[:, :, None] - torch.arange(extent)
        seen = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
        assert mask.dtype == torch.bfloat16
        assert torch.equal(mask, torch.where(seen, 0.0, -torch.inf).bfloat16()[:, None].repeat(1, 1, 3, 1))


def test_rows_written_alone_do_not_touch_the_others():
    cache = KVCache(SHAPES, rows=3, capacity=60, dtype=torch.float32, device="cpu")
    pass_ = cache.open(torch.tensor([[0, 1]]), extent=2, rows=slice(1, 2))
    pass_.update(torch.ones(1, 2, 2, 4), torch.ones(1, 2, 2, 4), 0)
    by_row = cache.layers[0].unflatten(0, (3, cache.num_slots))
    assert by_row[1, :2].min() == 1 and by_row[0].abs().max() == 0 and by_row[2].abs().max() == 0
