"""Every family and its variants: the split stack is the model, the tokens are `generate`'s, and what a family does
differently is not left out.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from family_checks import (
    DRAFTERS,
    NUM_DRAFTED,
    PROMPT_LENGTHS,
    STARTS,
    TOLERANCE,
    decoded,
    full_forward,
    generated,
    relative_error,
    split_errors,
    split_forward,
    target_of,
)

from selfspec import build_drafter, decode
from selfspec.errors import UserError
from selfspec.target import attention, wrap_target
from selfspec.target.families import FAMILIES, as_they_are
from tiny_models import TINY, prompt_ids, tiny_model

NAMES_AND_HEADS = [(name, tied) for name in TINY for tied in (False, True)]


def test_every_supported_family_is_tested():
    assert {tiny.model_type for tiny in TINY.values()} == set(FAMILIES)


@pytest.mark.parametrize(("name", "tied"), NAMES_AND_HEADS)
def test_split_stack_equals_full_forward_for_one_query_and_for_many_after_rollback_and_over_the_window(name, tied):
    target = target_of(name, tied)
    assert target.tied == tied
    for start in STARTS:
        for split in range(target.num_layers + 1):
            assert max(split_errors(target, start, split)) < TOLERANCE, (start, split)


@pytest.mark.parametrize("name", TINY)
@torch.inference_mode()
def test_rows_of_unequal_length_in_one_pass_do_not_see_each_other(name):
    target = target_of(name)
    ids = [prompt_ids(17, seed=1), prompt_ids(10, seed=2)]
    cache = target.make_cache(rows=2, capacity=64)
    for row, tokens in enumerate(ids):
        split_forward(target, cache, tokens[:-3], 0, 2, slice(row, row + 1))
    positions = torch.tensor([[14, 15, 16], [7, 8, 9]])
    pass_ = cache.open(positions, extent=17)
    hidden = target.embed(torch.tensor([tokens[-3:] for tokens in ids]))
    logits = target.head(target.run_layers(hidden, 0, target.num_layers, pass_))
    for row, tokens in enumerate(ids):
        assert relative_error(logits[row], full_forward(target.hf_model, tokens)[-3:]) < TOLERANCE


@pytest.mark.parametrize("num_drafted", [1, NUM_DRAFTED])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", TINY)
def test_greedy_tokens_equal_generate(name, drafter, num_drafted):
    assert decoded(name, drafter, num_drafted) == [generated(name, length) for length in PROMPT_LENGTHS]


@pytest.mark.parametrize("name", TINY)
@torch.inference_mode()
def test_bfloat16_stays_bfloat16_and_near_the_full_forward(name):
    """Coarse on purpose: what must not happen is a quantity in another dtype or a factor lost in the conversion."""
    model = tiny_model(name, dtype=torch.bfloat16)
    target = wrap_target(model)
    ids = prompt_ids(20)
    logits = split_forward(target, target.make_cache(1, 64), ids, 0, 2)
    assert logits.dtype == torch.bfloat16
    expected = full_forward(model, ids)
    assert (logits - expected).float().pow(2).mean().sqrt() < 0.2 * expected.float().std()


WITHOUT = {
    "mistral": {"window": lambda config, layer: None},
    "qwen2_sliding": {"window": lambda config, layer: config.sliding_window},
    "gemma2": {"finish_logits": as_they_are},
    "gemma3_text": {"rotary_by_layer_type": False},
    "granite": {"embed_scale": lambda config: 1.0},
    "cohere": {"finish_logits": as_they_are},
    "gpt2": {"learned_positions": None},
    "opt": {"position_offset": 0},
}


@pytest.mark.parametrize("name", WITHOUT)
@torch.inference_mode()
def test_what_a_family_does_differently_would_be_missed(name, monkeypatch):
    """Negative controls: without the one thing, the same comparison fails by far."""
    model = tiny_model(name)
    family = dataclasses.replace(FAMILIES[model.config.model_type], **WITHOUT[name])
    monkeypatch.setitem(FAMILIES, model.config.model_type, family)
    ids = prompt_ids(30)
    target = wrap_target(model)
    if name == "gemma3_text":  # its rotary module has no table without a layer type: give all layers the same one
        rotary = target._rotary
        target._rotary = lambda hidden, positions: rotary(hidden, positions, "full_attention")
    logits = split_forward(target, target.make_cache(1, 64), ids, 0, 2)
    assert relative_error(logits, full_forward(model, ids)) > 1e-2


@torch.inference_mode()
def test_a_forgotten_attention_cap_would_be_missed(monkeypatch):
    grouped = attention.grouped_attention
    monkeypatch.setitem(
        attention.AttentionInterface._global_mapping,
        attention.IMPLEMENTATION,
        lambda *given, softcap=None, **named: grouped(*given, **named),
    )
    target, ids = target_of("gemma2"), prompt_ids(30)
    logits = split_forward(target, target.make_cache(1, 64), ids, 0, 2)
    assert relative_error(logits, full_forward(target.hf_model, ids)) > 1e-2


@torch.inference_mode()
def test_experts_are_chosen_token_by_token():
    """A token's experts do not depend on what else is in the pass, so a rejected draft cannot change a kept token."""
    block = target_of("qwen3_moe").layers[0].mlp
    hidden = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(0))
    together = block(hidden)
    alone = torch.cat([block(hidden[:, t : t + 1]) for t in range(9)], 1)
    assert relative_error(together, alone) < TOLERANCE
    changed = hidden.clone()
    changed[:, 5:] = 100 * torch.randn(1, 4, 32)
    assert relative_error(block(changed)[:, :5], together[:, :5]) < TOLERANCE


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", ["gpt2", "opt", "phi3_longrope"])
def test_drafts_may_reach_past_the_last_position_and_the_tokens_are_still_generates(name, drafter):
    model = tiny_model(name, max_positions=32, **({"original_max_position_embeddings": 32} if "phi3" in name else {}))
    target = wrap_target(model)
    prompt = prompt_ids(12, seed=3)
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, 12:].tolist()
    options = {"exit_layer": 2} if drafter == "early_exit" else {}
    built = build_drafter(drafter, target, **options)
    outputs = decode(target, built, [prompt], max_new_tokens=20, lookahead=6, max_batch_rows=1)
    assert outputs[0].token_ids == expected
    with pytest.raises(UserError, match="has 32"):
        decode(target, built, [prompt], max_new_tokens=21)


@torch.inference_mode()
def test_long_rope_is_used_with_its_first_table_only():
    """Beyond the original length the table would change for every earlier key as well, and the cache be wrong."""
    assert target_of("phi3_longrope").max_positions == 128
    assert target_of("llama").max_positions == 256


def test_attention_sinks_are_refused():
    with pytest.raises(UserError, match="attention sinks"):
        attention.grouped_attention(torch.nn.Linear(1, 1), *(torch.zeros(1, 1, 1, 1),) * 4, s_aux=torch.zeros(1))
