"""At T=0 in float32 the tokens are `model.generate`'s: every family, every drafter, every K, any lengths, any number
of rows.
"""

from __future__ import annotations

import functools

import pytest
import torch
from crafted_drafters import AlwaysWrong

from selfspec import Decoder, Sampling, build_drafter, decode, wrap_target
from tiny_models import FAMILIES, prompt_ids, tiny_llama

pytestmark = pytest.mark.usefixtures("small_chunks")

NEW_TOKENS = 24


@functools.cache
def target_of(family):
    return wrap_target(FAMILIES[family]())


@functools.cache
def generated(family, length):
    """What transformers generates, once per family and prompt."""
    ids = torch.tensor([prompt_ids(length, seed=length)])
    out = target_of(family).hf_model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    return out[0, length:].tolist()


DRAFTERS = {
    "none": lambda target: None,
    "first_layer": lambda target: build_drafter("early_exit", target, exit_layer=1),
    "last_layer_but_one": lambda target: build_drafter("early_exit", target, exit_layer=target.num_layers - 1),
    "independent": lambda target: build_drafter(
        "independent", target, model=wrap_target(tiny_llama(seed=5, num_layers=2))
    ),
    "independent_equal": lambda target: build_drafter("independent", target, model=target),
    "layer_skip": lambda target: build_drafter("layer_skip", target, skip_attention=[1, 2], skip_mlp=[2]),
    "ngram": lambda target: build_drafter("ngram", target),
    "always_wrong": lambda target: AlwaysWrong(),
}


@pytest.mark.parametrize("num_drafted", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("drafter", sorted(DRAFTERS))
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_tokens_equal_generate(family, drafter, num_drafted):
    target = target_of(family)
    lengths = (1, 2, 9, 70)  # 70: more than one prefill chunk; one decoder, prompts of unequal length after each other
    prompts = [prompt_ids(length, seed=length) for length in lengths]
    outputs = decode(
        target, DRAFTERS[drafter](target), prompts, max_new_tokens=NEW_TOKENS, lookahead=num_drafted, max_batch_rows=1
    )
    for length, output in zip(lengths, outputs, strict=True):
        assert output.token_ids == generated(family, length), (family, drafter, length)
        assert sum(record.num_emitted for record in output.rounds) == len(output.token_ids)


@pytest.mark.parametrize("max_batch_rows", [2, 3, 8])
@pytest.mark.parametrize("drafter", sorted(DRAFTERS))
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_ragged_rows_refilled_as_they_finish_equal_one_row_decoding(family, drafter, max_batch_rows):
    target = target_of(family)
    lengths = (9, 1, 70, 2, 9)
    prompts = [prompt_ids(length, seed=length) for length in lengths]
    outputs = decode(
        target,
        DRAFTERS[drafter](target),
        prompts,
        max_new_tokens=NEW_TOKENS,
        lookahead=3,
        max_batch_rows=max_batch_rows,
    )
    assert [output.token_ids for output in outputs] == [generated(family, length) for length in lengths]


def test_a_drafter_equal_to_the_target_accepts_everything():
    target = target_of("llama")
    drafter = build_drafter("independent", target, model=target)
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        output = decode(
            target, drafter, [prompt_ids(9)], max_new_tokens=40, lookahead=4, sampling=sampling, ignore_eos=True
        )[0]
        assert all(record.num_accepted == record.num_drafted == 4 for record in output.rounds)
        assert output.alpha_sum == pytest.approx(output.alpha_count, rel=1e-5)


def test_an_always_wrong_drafter_costs_rounds_and_nothing_else():
    target = target_of("llama")
    output = decode(target, AlwaysWrong(), [prompt_ids(9, seed=9)], max_new_tokens=NEW_TOKENS, lookahead=4)[0]
    assert output.token_ids == generated("llama", 9)
    assert all(record.num_accepted == 0 and record.num_emitted == 1 for record in output.rounds)


@pytest.mark.parametrize("max_batch_rows", [1, 3])
@pytest.mark.parametrize("num_drafted", [1, 4])
@pytest.mark.parametrize("drafter", sorted(set(DRAFTERS) - {"none"}))
def test_coupled_sampling_equals_autoregressive_sampling_token_for_token(drafter, num_drafted, max_batch_rows):
    target = target_of("qwen3")
    prompts = [prompt_ids(length, seed=length) for length in (3, 12, 5)]
    options = dict(max_new_tokens=20, sampling=Sampling(temperature=0.9, top_p=0.95), acceptance="coupled", seed=7)
    expected = [output.token_ids for output in decode(target, None, prompts, **options)]
    options |= dict(lookahead=num_drafted, max_batch_rows=max_batch_rows)
    outputs = decode(target, DRAFTERS[drafter](target), prompts, **options)
    assert [output.token_ids for output in outputs] == expected
    other = decode(target, None, prompts, **{**options, "seed": 8})
    assert [output.token_ids for output in other] != expected


def test_one_allocation_serves_a_thousand_rounds_and_prompts_of_any_order():
    target = target_of("llama")
    decoder = Decoder(target, build_drafter("early_exit", target, exit_layer=2), capacity=200)
    decoder.decode([prompt_ids(5)], max_new_tokens=150, lookahead=2, ignore_eos=True)
    pointer, rounds = decoder.rows.cache.storage.data_ptr(), 0
    while rounds < 1000:
        output = decoder.decode([prompt_ids(5 + rounds % 7)], max_new_tokens=150, lookahead=2, ignore_eos=True)[0]
        rounds += len(output.rounds)
        assert decoder.rows.cache.storage.data_ptr() == pointer
