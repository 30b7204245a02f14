"""What a drafter refuses, and how it says so."""

from __future__ import annotations

import pytest

from selfspec import UserError, build_drafter, wrap_target
from selfspec.config import conf_names
from selfspec.drafters import DRAFTERS
from selfspec.target.byte_tokenizer import byte_tokenizer
from tiny_models import tiny_llama

TARGET = wrap_target(tiny_llama(), name="tiny")


@pytest.mark.parametrize("exit_layer", [-1, 0, 4, 5])
def test_exit_layers_outside_the_stack_are_refused_with_the_allowed_range(exit_layer):
    with pytest.raises(UserError, match=rf"exit_layer={exit_layer} .* tiny, which has 4 layers: allowed are 1 to 3"):
        build_drafter("early_exit", TARGET, exit_layer=exit_layer)


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("early_exits", {}, r"No drafter named 'early_exits'.*Did you mean 'early_exit'"),
        ("early_exit", {"exit_layr": 2}, r"no option 'exit_layr'.*Did you mean 'exit_layer'"),
        ("early_exit", {"exit_layer": "two"}, r"exit_layer"),
        ("early_exit", {"exit_layer": None}, r"needs exit_layer"),
        ("none", {"exit_layer": 2}, r"takes no options"),
        ({"kind": "nothing"}, {}, r"No drafter of kind 'nothing'"),
        ({"kind": ["early_exit"]}, {}, r"No drafter of kind \['early_exit'\]"),
        (5, {}, r"a mapping with `kind` and options; given: 5"),
        ("independent", {"model": "no-such-model"}, r"No target 'no-such-model'.*smollm2-135m"),
    ],
)
def test_unknown_names_and_options_are_refused_with_what_is_allowed(name, options, message):
    with pytest.raises(UserError, match=message):
        build_drafter(name, TARGET, **options)


def test_a_draft_model_with_another_vocabulary_or_tokenizer_is_refused():
    with pytest.raises(UserError, match=r"vocabulary of 50 tokens, the target tiny one of 97"):
        build_drafter("independent", TARGET, model=wrap_target(tiny_llama(vocab_size=50)))
    ours, theirs = byte_tokenizer(), byte_tokenizer()
    theirs.add_tokens(["<new>"])
    with pytest.raises(UserError, match=r"another tokenizer .*'<new>' has id 256 there and None here"):
        target = wrap_target(tiny_llama(), tokenizer=ours)
        build_drafter("independent", target, model=wrap_target(tiny_llama(), tokenizer=theirs))


def test_a_draft_model_with_too_few_positions_is_refused_before_anything_runs():
    from selfspec import decode

    drafter = build_drafter("independent", TARGET, model=wrap_target(tiny_llama(max_positions=20)))
    with pytest.raises(UserError, match=r"has 20 positions; prompt and output need 30"):
        decode(TARGET, drafter, [[5] * 10], max_new_tokens=20, lookahead=4)


def test_every_registered_drafter_has_its_config():
    assert set(DRAFTERS) <= set(conf_names("drafter"))
