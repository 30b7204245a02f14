"""Fused, packed layers are the same model: same logits, same tokens, one copy of the weights, and a fallback that
works.
"""

from __future__ import annotations

import pytest
import torch
from layer_drafts import random_draft

from selfspec import UserError, build_drafter, decode, load_drafter, load_target, wrap_target
from selfspec.target.byte_tokenizer import byte_tokenizer
from selfspec.target.fused import FUSABLE, fuse
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
