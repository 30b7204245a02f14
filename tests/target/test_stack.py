"""A target is a view: the model it was made from stays as it was, and shares every weight."""

from __future__ import annotations

import pytest
import torch
from family_checks import full_forward, split_forward

from selfspec.target import wrap_target
from tiny_models import TINY, prompt_ids, tiny_llama, tiny_model


@pytest.mark.parametrize("name", TINY)
@torch.inference_mode()
def test_wrapping_leaves_the_model_untouched(name):
    model, ids = tiny_model(name), prompt_ids(9)
    configuration = model.config.to_dict()
    implementation = model.config._attn_implementation
    before = full_forward(model, ids)
    target = wrap_target(model)
    split_forward(target, target.make_cache(1, 32), ids, 0, 2)
    assert model.config._attn_implementation == implementation
    assert model.config.to_dict() == configuration
    assert all(getattr(module, "config", model.config) is model.config for module in model.modules())
    assert torch.equal(before, full_forward(model, ids))


def test_the_view_shares_the_weights_and_not_the_configuration():
    model = tiny_llama()
    layer = wrap_target(model).layers[0]
    assert layer.self_attn.q_proj.weight is model.model.layers[0].self_attn.q_proj.weight
    assert layer.self_attn.config is not model.model.layers[0].self_attn.config


def test_wrapping_a_model_in_training_leaves_it_in_training():
    model = tiny_llama().train()
    wrap_target(model)
    assert all(module.training for module in model.modules())


def test_two_targets_of_one_model_do_not_disturb_each_other():
    model, ids = tiny_llama(), prompt_ids(9)
    first, second = wrap_target(model), wrap_target(model)
    with torch.inference_mode():
        alone = split_forward(first, first.make_cache(1, 32), ids, 0, 2)
        split_forward(second, second.make_cache(1, 32), ids[::-1], 0, 3)
        assert torch.equal(split_forward(first, first.make_cache(1, 32), ids, 0, 2), alone)
