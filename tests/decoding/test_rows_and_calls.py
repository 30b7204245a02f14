"""What rows and calls must not leave behind: idle rows, rows that finish at different times, calls that failed, and
draft lengths that change from round to round.
"""

from __future__ import annotations

import functools

import pytest

from selfspec import Decoder, Sampling, UserError, build_drafter, decode, wrap_target
from tiny_models import prompt_ids, tiny_llama

DRAFTERS = ("none", "early_exit", "independent", "ngram")


@functools.cache
def target():
    return wrap_target(tiny_llama())


@functools.cache
def drafter(name):
    options = {"early_exit": {"exit_layer": 2}, "independent": {"model": wrap_target(tiny_llama(seed=5, num_layers=2))}}
    return None if name == "none" else build_drafter(name, target(), **options.get(name, {}))


def autoregressive(prompts, **options):
    return [output.token_ids for output in decode(target(), None, prompts, ignore_eos=True, **options)]


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_row_left_idle_by_a_longer_call_does_not_disturb_one_that_drafts_more(name):
    """The idle row ended near the end of its slots, where a longer draft has no room behind it."""
    decoder = Decoder(target(), drafter(name), max_batch_rows=2)
    decoder.decode([prompt_ids(50)] * 2, max_new_tokens=10, lookahead=1, ignore_eos=True)
    output = decoder.decode([prompt_ids(5)], max_new_tokens=5, lookahead=8, ignore_eos=True)[0]
    assert output.token_ids == autoregressive([prompt_ids(5)], max_new_tokens=5)[0]
