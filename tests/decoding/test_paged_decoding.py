"""Decoding on blocks gives the tokens of the contiguous cache: every drafter, ragged rows, rollback across block edges,
refilled rows, shared prompts, and too few blocks.
"""

from __future__ import annotations

import functools

import pytest
import torch

from selfspec import Decoder, Sampling, UserError, build_drafter, decode, wrap_target
from selfspec.cache import Paged, PagedKVCache
from selfspec.cache.blocks import BlockPool
from tiny_models import FAMILIES, prompt_ids, tiny_llama

NEW_TOKENS = 24
DRAFTERS = {
    "none": {},
    "early_exit": {"exit_layer": 2},
    "independent": {"model": "small"},
    "ngram": {},
}


@functools.cache
def target_of(family):
    return wrap_target(FAMILIES[family]())


@functools.cache
def drafter_of(name, family):
    options = dict(DRAFTERS[name])
    if options.get("model"):
        options["model"] = wrap_target(tiny_llama(seed=5, num_layers=2))
    return None if name == "none" else build_drafter(name, target_of(family), **options)


def generated(prompt, family="llama", num_new=NEW_TOKENS):
    out = target_of(family).hf_model.generate(torch.tensor([prompt]), max_new_tokens=num_new, do_sample=False)
    return out[0, len(prompt) :].tolist()


def token_ids(outputs):
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("name", sorted(DRAFTERS))
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_tokens_equal_generate_for_ragged_rows_that_are_refilled(family, name, block_size):
    """K=5 with blocks of 4: nearly every round crosses a block's edge, and most are rolled back across one."""
    prompts = [prompt_ids(length, seed=length) for length in (9, 1, 70, 2, 9, 16, 17)]
    outputs = decode(
        target_of(family),
        drafter_of(name, family),
        prompts,
        max_new_tokens=NEW_TOKENS,
        lookahead=5,
        max_batch_rows=3,
        cache=Paged(block_size),
    )
    assert token_ids(outputs) == [generated(prompt, family) for prompt in prompts]


@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_sampled_tokens_equal_those_of_the_contiguous_cache(name):
    prompts = [prompt_ids(length, seed=length) for length in (3, 12, 5, 12)]
    for acceptance in ("coupled", "rejection"):
        options = dict(max_new_tokens=20, sampling=Sampling(temperature=0.9), acceptance=acceptance, seed=7)
        options |= dict(lookahead=3, max_batch_rows=2, ignore_eos=True)
        paged, contiguous = (
            decode(target_of("llama"), drafter_of(name, "llama"), prompts, cache=cache, **options)
            for cache in (Paged(4), "contiguous")
        )
        assert token_ids(paged) == token_ids(contiguous)


def test_blocks_come_and_go_with_the_rows_length_and_all_are_free_at_the_end():
    decoder = Decoder(target_of("llama"), drafter_of("early_exit", "llama"), cache=Paged(block_size=4))
    held, freed = [], 0

    def watch(event):
        blocks = decoder.rows.cache.blocks.rows[0].blocks
        length = decoder.rows._lengths[0]
        held.append((len(blocks), -(-length // 4)))

    trim = BlockPool.trim

    def counting_trim(pool, row, length):
        nonlocal freed
        before = pool.num_free
        behind = trim(pool, row, length)
        freed += pool.num_free - before
        return behind

    BlockPool.trim = counting_trim
    try:
        decoder.decode([prompt_ids(9)], max_new_tokens=30, lookahead=6, ignore_eos=True, on_round=watch)
    finally:
        BlockPool.trim = trim
    assert held and all(count == needed for count, needed in held), "after a round a row holds what it has committed"
    assert freed > len(held), "six drafts at blocks of four: a rollback gives back a block or two"
    assert decoder.rows.cache.blocks.num_in_use == 0


@pytest.mark.parametrize("name", sorted(DRAFTERS))
@pytest.mark.parametrize("length, num_saved, num_copies", [(16, 3, 4), (18, 7, 7), (33, 14, 3)])
def test_equal_prompts_share_their_blocks_and_differ_where_the_rows_do(name, length, num_saved, num_copies):
    """Four rows with one prompt, then four that diverge inside a block: fewer blocks, the same tokens."""
    common = prompt_ids(length, seed=3)
    prompts = [common] * 4 + [[*common, *prompt_ids(3, seed=10 + i)] for i in range(4)]
    decoder = Decoder(target_of("llama"), drafter_of(name, "llama"), max_batch_rows=8, cache=Paged(16))
    saved = []

    def watch(event):
        saved.append(decoder.rows.cache.blocks.num_saved)

    options = dict(max_new_tokens=12, lookahead=3, ignore_eos=True)
    sampled = dict(options, sampling=Sampling(temperature=1.0), acceptance="coupled", seed=3)
    outputs = decoder.decode(prompts, on_round=watch, **sampled)
    expected = token_ids(decode(target_of("llama"), None, prompts, **sampled))
    assert token_ids(outputs) == expected
    assert len({tuple(ids) for ids in expected}) > 6, "rows that share a prompt go different ways"
    assert max(saved) == num_saved, "whole blocks of what prompts have in common are there once"
    assert decoder.rows.cache.blocks.num_copies == num_copies
    # a prompt's last token is pending, so its keys and values are not there yet when the next prompt comes
    reused = [output.num_reused_tokens for output in outputs]
    assert reused == ([0] * 8 if name == "independent" else [0] + [length - 1] * 4 + [length] * 3)


def test_a_missing_copy_on_write_is_seen_in_the_tokens(monkeypatch):
    """Negative control: rows that write into the block they share get other tokens."""
    prompt = prompt_ids(18, seed=3)
    options = dict(max_new_tokens=12, sampling=Sampling(temperature=1.0), ignore_eos=True, max_batch_rows=4)
    expected = token_ids(decode(target_of("llama"), None, [prompt] * 4, cache=Paged(16), **options))
    monkeypatch.setattr(BlockPool, "reserve", _reserve_without_copies)
    assert token_ids(decode(target_of("llama"), None, [prompt] * 4, cache=Paged(16), **options)) != expected


def _reserve_without_copies(pool, row, first, end):
    held = pool.rows[row]
    held.next_write = max(first, held.next_write)
    while len(held.blocks) * pool.block_size < end:
        held.blocks.append(pool._take())
    return []


@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_requests_wait_for_blocks_and_come_out_the_same(name):
    """Blocks for the longest request and little more: rows stand idle rather than run out."""
    prompts = [prompt_ids(length, seed=length) for length in (40, 9, 3, 30, 9, 1)]
    most = 40 + NEW_TOKENS + 5
    decoder = Decoder(
        target_of("llama"), drafter_of(name, "llama"), max_batch_rows=4, cache=Paged(4, num_blocks=-(-most // 4))
    )
    running = []
    options = dict(max_new_tokens=NEW_TOKENS, lookahead=4, ignore_eos=True)
    outputs = decoder.decode(prompts, on_round=lambda e: running.append(sum(map(bool, decoder.rows._ends))), **options)
    expected = decode(target_of("llama"), None, prompts, **options)
    assert token_ids(outputs) == token_ids(expected)
    assert 1 in running and max(running) > 1, "the long one ran alone, the short ones side by side"
    pool = decoder.rows.cache.blocks
    assert pool.num_in_use == 0 and pool.peak_in_use <= pool.num_blocks


def test_a_request_that_needs_more_blocks_than_there_are_is_refused_before_anything_runs(monkeypatch):
    decoder = Decoder(target_of("llama"), max_batch_rows=2, cache=Paged(16, num_blocks=4))
    monkeypatch.setattr("selfspec.decoding.decoder.run_requests", None)
    with pytest.raises(
        UserError, match="A request of 71 tokens .* needs 5 blocks of 16; there are 4. Allowed here: up"
    ):
        decoder.decode([prompt_ids(5), prompt_ids(60)], max_new_tokens=10)


def test_a_paged_decoder_takes_less_memory_for_unequal_requests_and_grows_when_it_must():
    decoder = Decoder(target_of("llama"), max_batch_rows=4, cache="paged")
    decoder.decode([prompt_ids(3)] * 3 + [prompt_ids(150)], max_new_tokens=5, ignore_eos=True)
    cache = decoder.rows.cache
    assert isinstance(cache, PagedKVCache) and cache.blocks.num_blocks == 3 * 1 + 10
    contiguous = Decoder(target_of("llama"), max_batch_rows=4)
    contiguous.decode([prompt_ids(3)] * 3 + [prompt_ids(150)], max_new_tokens=5, ignore_eos=True)
    assert cache.kv_bytes < 0.4 * contiguous.rows.cache.kv_bytes
    decoder.decode([prompt_ids(3)], max_new_tokens=5)
    decoder.decode([prompt_ids(3)] * 3 + [prompt_ids(150)], max_new_tokens=5)
    assert decoder.rows.cache is cache, "what was enough once is enough again"
    decoder.decode([prompt_ids(100)] * 4, max_new_tokens=5)
    assert decoder.rows.cache.blocks.num_blocks >= 4 * 7


@pytest.mark.parametrize("name", ["none", "early_exit", "independent"])
def test_a_chat_that_goes_on_runs_only_its_new_tokens(name):
    decoder = Decoder(target_of("llama"), drafter_of(name, "llama"), capacity=200, cache=Paged(16))
    options = dict(max_new_tokens=20, lookahead=3, ignore_eos=True)
    first = decoder.decode([prompt_ids(30)], reuse=True, **options)[0]
    turn = [*prompt_ids(30), *first.token_ids, *prompt_ids(5, seed=8)]
    second = decoder.decode([turn], reuse=True, **options)[0]
    assert second.token_ids == decode(target_of("llama"), None, [turn], **options)[0].token_ids
    assert second.num_reused_tokens == (0 if name == "independent" else 30 + 20 - 1)
    again = decoder.decode([turn], **options)[0]
    assert again.num_reused_tokens == 0, "a call that does not ask for it finds nothing of the calls before"


def test_unknown_kinds_of_cache_are_refused_by_name():
    with pytest.raises(UserError, match="cache='pagd' is unknown. Allowed: contiguous, paged. Did you mean 'paged'"):
        decode(target_of("llama"), None, [[5]], cache="pagd")
