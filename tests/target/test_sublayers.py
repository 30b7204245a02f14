"""A layer without its attention or MLP, in every family: as if what that sublayer writes out were zero."""

from __future__ import annotations

import pytest
import torch
from family_checks import full_forward, relative_error

from selfspec import wrap_target
from selfspec.target import Target
from selfspec.target.fused import FUSABLE, fuse
from tiny_models import TINY, prompt_ids, tiny_model

# what a sublayer's output goes through last, by family; experts of a mixture have theirs in one tensor
LAST = ("o_proj", "out_proj", "dense", "c_proj", "down_proj", "dense_4h_to_h", "fc2")
IDS = prompt_ids(20)


@torch.no_grad()
def emptied(name: str, attention: list[int], mlp: list[int]) -> torch.nn.Module:
    """The model with zeros for what these sublayers add."""
    model = tiny_model(name)
    target = wrap_target(model)
    for layers, parts in ((attention, target.family.attention_parts), (mlp, target.family.mlp_parts)):
        for index in layers:
            part = target.layers[index].get_submodule(parts[0])
            zeroed = [p for n, p in part.named_parameters() if parts[0] in LAST or set(n.split(".")) & set(LAST)]
            assert zeroed, f"{name}: no output projection among {[n for n, _ in part.named_parameters()]}"
            for parameter in zeroed:
                parameter.zero_()
    return model


@torch.inference_mode()
def thinned_logits(target: Target, attention: list[int], mlp: list[int]) -> torch.Tensor:
    """`[T, V]`, by a pass whose skipped attention finds the cache full of numbers that it must not touch."""
    cache = target.make_cache(1, 32)
    cache.storage.fill_(7.0)
    pass_ = cache.open(torch.arange(len(IDS))[None], len(IDS))
    layers = target.thinned(attention, mlp)
    hidden = target.run_layers(target.embed(torch.tensor([IDS])), 0, target.num_layers, pass_, layers)
    for index in range(target.num_layers):
        assert bool((cache.layers[index] == 7.0).all()) == (index in attention), "skipped attention writes no keys"
    return target.head(hidden)[0]


SETS = {"attention": ([0, 2], []), "MLP": ([], [1, 3]), "both": ([1, 2], [2]), "all of a layer": ([0, 3], [0, 3])}


@pytest.mark.parametrize("skipped", SETS)
@pytest.mark.parametrize("name", sorted(set(TINY) - {"opt_post_norm"}))
def test_a_skipped_sublayer_adds_nothing(name, skipped):
    target = wrap_target(tiny_model(name))
    expected = full_forward(emptied(name, *SETS[skipped]), IDS)
    assert relative_error(thinned_logits(target, *SETS[skipped]), expected) < 1e-5
    whole = full_forward(target.hf_model, IDS)
    assert relative_error(thinned_logits(target, [], []), whole) < 1e-5, "the layers themselves are as they were"
    assert relative_error(expected, whole) > 1e-3, "the sublayers did matter"


@torch.inference_mode()
def test_a_norm_behind_a_skipped_sublayer_is_skipped_with_it():
    """OPT-350m normalises the sum: without its sublayer and its norm a layer is the identity."""
    target = wrap_target(tiny_model("opt_post_norm"))
    cut = wrap_target(tiny_model("opt_post_norm"))
    pass_ = cut.make_cache(1, 32).open(torch.arange(len(IDS))[None], len(IDS))
    hidden = cut.run_layers(cut.embed(torch.tensor([IDS])), 0, 2, pass_)
    layer = target.layers[2]
    expected = layer.final_layer_norm(hidden + layer.fc2(layer.activation_fn(layer.fc1(hidden))))
    assert torch.allclose(target.thinned([2], [])[2](hidden), expected, rtol=1e-4, atol=1e-4)
    assert relative_error(thinned_logits(target, [2, 3], [2, 3])[None], cut.head(hidden)) < 1e-5


@pytest.mark.parametrize("skipped", SETS)
@pytest.mark.parametrize("name", FUSABLE)
def test_fused_layers_skip_the_same(name, skipped):
    plain, fused = wrap_target(tiny_model(name)), wrap_target(tiny_model(name))
    assert fuse(fused)
    expected = thinned_logits(plain, *SETS[skipped])
    assert relative_error(thinned_logits(fused, *SETS[skipped]), expected) < 1e-4
