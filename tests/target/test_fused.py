"""Fused, packed layers are the same model: same logits, same tokens, one copy of the weights, and a fallback that
works.
"""

from __future__ import annotations

import pytest
import torch
from layer_drafts import random_draft

from selfspec import UserError, build_drafter, decode, load_drafter, load_target, wrap_target
from selfspec.target import packed
from selfspec.target.byte_tokenizer import byte_tokenizer
from selfspec.target.fused import FUSABLE, fuse
from selfspec.target.packed import PackedLinear, packing_available
from tiny_models import FAMILIES, prompt_ids, tiny_llama

CPU = torch.device("cpu")


def logits(target, ids, split):
    cache = target.make_cache(2, 64)
    pass_ = cache.open(torch.arange(len(ids))[None], len(ids), rows=slice(1, 2))
    hidden = target.run_layers(target.embed(torch.tensor([ids])), 0, split, pass_)
    return target.head(target.run_layers(hidden, split, target.num_layers, pass_))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FUSABLE)
@torch.inference_mode()
def test_fused_logits_equal_transformers_layers(family, tied):
    target, plain = wrap_target(FAMILIES[family](tied=tied)), wrap_target(FAMILIES[family](tied=tied))
    assert fuse(target)
    for width in (1, 5, 30):
        expected = logits(plain, prompt_ids(width), 2)
        assert (
            logits(target, prompt_ids(width), 2) - expected
        ).abs().max() < 1e-4 * expected.abs().max()  # sums run in another order


@pytest.mark.parametrize("family", FUSABLE)
def test_fused_targets_generate_the_same_tokens_whatever_the_drafter(family):
    model = FAMILIES[family]()
    target = wrap_target(model)
    fuse(target)
    prompts = [prompt_ids(9), prompt_ids(70)]
    expected = [
        model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
        for ids in prompts
    ]
    for drafter in (None, build_drafter("early_exit", target, exit_layer=2), build_drafter("ngram", target)):
        outputs = decode(target, drafter, prompts, max_new_tokens=24, lookahead=3, max_batch_rows=2)
        assert [output.token_ids for output in outputs] == expected


@pytest.mark.skipif(not packing_available(torch.float32, CPU), reason="this torch has no packed products")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_weight_is_blocked_and_no_pass_reorders_it_again(dtype, capfd):
    """A row-major weight (`ab`) costs two tokens twice what one costs: oneDNN's own log tells the layout."""
    if not packing_available(dtype, CPU):
        pytest.skip(f"no packed {dtype} product on this machine")
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        linear = PackedLinear(torch.randn(256, 128).to(dtype), None)
        for tokens in (1, 2, 9):
            linear(torch.randn(1, tokens, 128).to(dtype))
    lines = [line.split(",") for line in capfd.readouterr().out.splitlines() if ",exec,cpu," in line]
    products = [line for line in lines if "inner_product" in line]
    layouts = {part for line in products for part in " ".join(line).split() if part.startswith("wei:")}
    assert products and not any("ab::" in layout.replace("blocked:", "") for layout in layouts), layouts
    reorders = [line for line in lines if "reorder" in line]
    assert len(reorders) <= 1, reorders  # when it was packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 48)])
def test_a_packed_linear_is_a_linear_with_its_residual(dtype, bias):
    weight, x = torch.randn(48, 64).to(dtype), torch.randn(1, 5, 64).to(dtype)
    bias = None if bias is None else bias.to(dtype)
    linear = PackedLinear(weight, bias)
    expected = torch.nn.functional.linear(x, weight, bias)
    tolerance = (1e-6 if dtype == torch.float32 else 2**-7) * float(expected.abs().max())  # two roundings
    assert (linear(x) - expected).abs().max() <= tolerance
    assert (linear.plus(x, x[..., :48]) - expected - x[..., :48]).abs().max() <= tolerance
    assert linear.nbytes == weight.numel() * dtype.itemsize + (0 if bias is None else bias.numel() * dtype.itemsize)


def test_without_the_private_operators_the_plain_ones_are_used_and_the_result_is_the_same(monkeypatch):
    expected = PackedLinear(torch.eye(64), None)(torch.ones(1, 1, 64))
    monkeypatch.setattr(packed.torch.ops.mkldnn, "_linear_pointwise", None)
    assert not packing_available(torch.float32, CPU)
    assert not fuse(wrap_target(tiny_llama()))
    linear = PackedLinear(torch.eye(64), None)
    assert not linear.packed
    assert torch.equal(linear(torch.ones(1, 1, 64)), expected)
    assert torch.equal(linear.plus(torch.ones(1, 1, 64), expected), 2 * expected)


def test_an_operator_that_came_to_mean_something_else_is_not_used(monkeypatch):
    monkeypatch.setattr(packed, "_check", lambda *_: (_ for _ in ()).throw(RuntimeError("disagrees")))
    assert not packing_available(torch.float32, CPU)


def test_packing_holds_the_weights_once_except_a_tied_head_and_the_plain_model_can_be_had_again():
    target = load_target("random-tiny", dtype="float32")
    plain = load_target("random-tiny", dtype="float32", fused=False)
    extra = plain.head_weight_VM.nbytes if plain.tied else 0
    assert target.weight_bytes == plain.weight_bytes + extra
    ids = prompt_ids(9)
    out = target.hf_model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, 9:].tolist()
    assert decode(target, None, [ids], max_new_tokens=8)[0].token_ids == out
    assert torch.equal(target.head_weight_VM, plain.head_weight_VM)


@pytest.mark.parametrize("draft", [{"d_vocab": 20}, {"own_head": False}])
def test_rows_of_an_untied_head_are_read_without_keeping_the_model_that_they_are_read_from(draft, tmp_path):
    """A packed target is in memory once; its plain weights, loaded again for a draft's head, are let go again."""
    tiny_llama(tied=False).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    target = load_target(str(tmp_path), "float32")
    assert not target.tied and target._model is None
    if "d_vocab" in draft:
        assert target.head_rows(torch.arange(20)).shape == (20, target.width) and target._model is None
        build_drafter("early_exit", target, exit_layer=2, **draft)
    else:
        plain = load_target(str(tmp_path), "float32", fused=False)
        load_drafter(
            random_draft("eagle3", plain, tmp_path / "d", feature_layers=(0, 1, 2), num_steps=1, **draft), target
        )
    assert target._model is None
    kept = target.hf_model  # asked for, it stays
    assert torch.equal(target.head_rows(), target.head_weight_VM) and target._model is kept


def test_asking_for_fused_layers_where_there_are_none_is_an_error():
    with pytest.raises(UserError, match=r"fused=True is not possible .*float64.*Allowed: llama"):
        load_target("random-tiny", dtype="float64", fused=True)
