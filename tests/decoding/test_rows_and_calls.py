"""What rows and calls must not leave behind: idle rows, rows that finish at different times, calls that failed, and
draft lengths that change from round to round.
"""

from __future__ import annotations

import functools

import pytest

from selfspec import Decoder, Sampling, UserError, build_drafter, decode, wrap_target
from selfspec.lookahead import Plan, build_lookahead
from tiny_models import prompt_ids, tiny_llama, tiny_model

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


class Cycle:
    """A policy that drafts another number of tokens each round, none included."""

    max_drafted = 5

    def __init__(self, counts=(0, 5, 1, 0, 0, 3)):
        self.counts, self.calls = counts, 0

    def choose(self):
        self.calls += 1
        return Plan(self.counts[self.calls % len(self.counts)])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8)], ids=["greedy", "coupled"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_number_of_drafts_may_change_from_round_to_round_and_be_none(name, sampling):
    options = dict(max_new_tokens=25, sampling=sampling, acceptance="coupled")
    prompts = [prompt_ids(length) for length in (1, 2, 7)]
    outputs = decode(target(), drafter(name), prompts, lookahead=Cycle(), max_batch_rows=2, ignore_eos=True, **options)
    assert [output.token_ids for output in outputs] == autoregressive(prompts, **options)


@pytest.mark.parametrize("name", DRAFTERS)
def test_rows_that_finish_at_different_times_and_drafts_beyond_the_room_that_is_left(name):
    """Odd lengths, prompts of one token, K far above what may still be emitted, three rows for seven prompts."""
    prompts = [prompt_ids(length, seed=length) for length in (1, 13, 2, 1, 64, 65, 3)]
    for num_new in (1, 2, 3, 7):
        options = dict(max_new_tokens=num_new, lookahead=7, max_batch_rows=3, ignore_eos=True)
        outputs = decode(target(), drafter(name), prompts, **options)
        assert [output.token_ids for output in outputs] == autoregressive(prompts, max_new_tokens=num_new)
        assert all(output.finish_reason == "length" for output in outputs)


@pytest.mark.parametrize("name", DRAFTERS)
def test_sampled_tokens_depend_on_seed_and_place_in_the_call_and_on_nothing_else(name):
    prompt, options = prompt_ids(6), dict(max_new_tokens=12, sampling=Sampling(temperature=1.0), ignore_eos=True)
    decoder = Decoder(target(), drafter(name), max_batch_rows=3)
    first = [output.token_ids for output in decoder.decode([prompt] * 5, seed=4, **options)]
    decoder.decode([prompt_ids(30)] * 2, seed=1, **options)
    assert [output.token_ids for output in decoder.decode([prompt] * 5, seed=4, **options)] == first
    assert len({tuple(token_ids) for token_ids in first}) == 5, "each request has noise of its own"
    others = [decoder.decode([prompt], seed=seed, **options)[0].token_ids for seed in (-1, 0, 4, 2**63, 2**64 + 4)]
    assert others[2] == first[0]
    assert len({tuple(token_ids) for token_ids in others[:4]}) == 4


@pytest.mark.parametrize("lookahead", [Plan(3), build_lookahead({"kind": "tree", "branches": [2, 1]}).choose()])
def test_a_draft_model_catches_up_with_all_it_has_missed(lookahead):
    """Rounds without a draft, more of them than half of what a row holds; then a draft that is always right."""

    class Late:
        max_drafted, max_width = 4, lookahead.width

        def __init__(self):
            self.plans = [Plan(0)] * 70 + [lookahead] * 40

        def choose(self):
            return self.plans.pop(0)

    equal = build_drafter("independent", target(), model=target())
    (output,) = decode(target(), equal, [prompt_ids(3)], lookahead=Late(), max_new_tokens=110, ignore_eos=True)
    drafts = [record for record in output.rounds if record.num_drafted]
    assert len(drafts) > 5 and all(record.num_accepted == record.num_drafted for record in drafts)


def test_a_draft_model_that_refuses_a_call_leaves_the_decoder_usable():
    small = wrap_target(tiny_llama(seed=5, num_layers=2, max_positions=64))
    decoder = Decoder(target(), build_drafter("independent", target(), model=small))
    with pytest.raises(UserError, match="64 positions; prompt and output need 80"):
        decoder.decode([prompt_ids(60)], max_new_tokens=20)
    output = decoder.decode([prompt_ids(5)], max_new_tokens=20, ignore_eos=True)[0]
    assert output.token_ids == autoregressive([prompt_ids(5)], max_new_tokens=20)[0]


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3_longrope"])
def test_a_draft_model_serves_up_to_its_last_position(family):
    """Drafts past its end are never kept: prompt and output decide, and not the length of a draft."""
    settings = {"original_max_position_embeddings": 64} if family == "phi3_longrope" else {}
    small = wrap_target(tiny_model(family, seed=5, num_layers=2, max_positions=64, **settings))
    decoder = Decoder(target(), build_drafter("independent", target(), model=small), max_batch_rows=2)
    prompts, options = [prompt_ids(50), prompt_ids(9)], dict(ignore_eos=True, lookahead=5)
    output = decoder.decode(prompts, max_new_tokens=14, **options)
    assert [one.token_ids for one in output] == autoregressive(prompts, max_new_tokens=14)
    with pytest.raises(UserError, match="64 positions; prompt and output need 65"):
        decoder.decode(prompts, max_new_tokens=15, **options)


def test_a_callback_that_raises_leaves_the_decoder_usable():
    decoder = Decoder(target(), drafter("early_exit"), max_batch_rows=2)

    def interrupt(event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decoder.decode([prompt_ids(5), prompt_ids(9)], max_new_tokens=9, on_round=interrupt)
    outputs = decoder.decode([prompt_ids(5), prompt_ids(9)], max_new_tokens=9, ignore_eos=True)
    assert [o.token_ids for o in outputs] == autoregressive([prompt_ids(5), prompt_ids(9)], max_new_tokens=9)
