"""The stack split anywhere is the model: [0, E) + [E, L) equals transformers' forward, after rollback and across windows too."""

from __future__ import annotations

import pytest
import torch

from selfspec.errors import UserError
from selfspec.target import wrap_target
from tiny_models import FAMILIES, prompt_ids, tiny_llama

TOLERANCE = 1e-5


def reference_logits(model, ids):
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def run_split(target, cache, ids, start, split, rows=slice(0, 1)):
    positions = torch.arange(start, start + len(ids))[None]
    pass_ = cache.open(positions, extent=start + len(ids), rows=rows)
    hidden = target.embed(torch.tensor([ids]))
    hidden = target.run_layers(hidden, 0, split, pass_)
    hidden = target.run_layers(hidden, split, target.num_layers, pass_)
    return target.head(hidden)[0]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", sorted(FAMILIES))
@torch.inference_mode()
def test_split_stack_equals_full_forward_for_single_and_wide_passes_after_rollback(family, tied):
    model = FAMILIES[family](tied=tied)
    target = wrap_target(model)
    ids = prompt_ids(30)
    for split in range(target.num_layers + 1):
        cache = target.make_cache(rows=2, capacity=64)
        run_split(target, cache, ids[:20], 0, split, rows=slice(1, 2))
        run_split(target, cache, [5, 6, 7, 8], 20, split, rows=slice(1, 2))  # rejected later
        one = run_split(target, cache, ids[20:21], 20, split, rows=slice(1, 2))
        wide = run_split(target, cache, ids[21:26], 21, split, rows=slice(1, 2))
        expected = reference_logits(model, ids[:26])
        assert (one - expected[20:21]).abs().max() < TOLERANCE * expected.abs().max()
        assert (wide - expected[21:26]).abs().max() < TOLERANCE * expected.abs().max()


@torch.inference_mode()
def test_a_missing_window_would_be_noticed():
    """Negative control: with the window of the sliding family forgotten, the same comparison must fail."""
    model = FAMILIES["mistral"]()
    target = wrap_target(model)
    target.windows = [None] * target.num_layers
    ids = prompt_ids(30)
    logits = run_split(target, target.make_cache(1, 64), ids, 0, 2)
    assert (logits - reference_logits(model, ids)).abs().max() > 1e-2


@torch.inference_mode()
def test_wrapping_leaves_the_model_untouched():
    model = tiny_llama()
    implementation = model.config._attn_implementation
    before = reference_logits(model, prompt_ids(9))
    target = wrap_target(model)
    run_split(target, target.make_cache(1, 32), prompt_ids(9), 0, 2)
    assert model.config._attn_implementation == implementation
    assert model.model.layers[0].self_attn.config is model.config
    assert torch.equal(before, reference_logits(model, prompt_ids(9)))
    assert target.layers[0].self_attn.q_proj.weight is model.model.layers[0].self_attn.q_proj.weight


def test_unsupported_models_are_refused_by_name():
    model = tiny_llama()
    model.config.model_type = "mamba"
    with pytest.raises(UserError, match=r"'mamba' is not supported; supported are: .*llama"):
        wrap_target(model)


def test_half_precision_on_a_cpu_is_refused():
    with pytest.raises(UserError, match="float16 on a CPU"):
        wrap_target(tiny_llama(dtype=torch.float16))
