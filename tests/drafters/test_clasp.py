"""CLaSp in context: what is skipped follows the text, and the output stays the target's own."""

from __future__ import annotations

import pytest
import torch

from selfspec import Decoder, Sampling, UserError, build_drafter, decode, wrap_target
from selfspec.decoding import graphs
from selfspec.decoding.rows import Rows
from selfspec.decoding.sampler import Sampler
from selfspec.drafters.clasp import Clasp
from selfspec.drafters.skip_search import best_skips
from selfspec.drafters.skip_set import SkipSet
from selfspec.sampling import build_rule, build_transforms
from selfspec.target.fused import fuse
from tiny_models import prompt_ids, tiny_llama, tiny_model

pytestmark = pytest.mark.usefixtures("small_chunks")

TARGET = wrap_target(tiny_llama(num_layers=6), name="tiny")
PROMPTS = [prompt_ids(length, seed=length) for length in (1, 70, 5)]
SAMPLED = dict(sampling=Sampling(temperature=0.9, top_p=0.95), acceptance="coupled", seed=7)
TREE = {"kind": "tree", "branches": [3, 2]}


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize(
    "cache, max_batch_rows, lookahead",
    [("contiguous", 3, 4), ("paged", 2, 4), ("contiguous", 1, 1), ("contiguous", 3, TREE), ("paged", 1, "confidence")],
)
def test_tokens_are_the_targets_own(cache, max_batch_rows, lookahead, options):
    options = dict(max_new_tokens=14, ignore_eos=True, **options)
    expected = [output.token_ids for output in decode(TARGET, None, PROMPTS, **options)]
    drafter = build_drafter("clasp", TARGET, num_skipped=2, every=2)
    outputs = decode(
        TARGET, drafter, PROMPTS, lookahead=lookahead, max_batch_rows=max_batch_rows, cache=cache, **options
    )
    assert [output.token_ids for output in outputs] == expected
    assert drafter.skipped.size == 4, "something was chosen"


@pytest.mark.parametrize("name", ["gpt2", "cohere", "gemma3_text", "mistral", "falcon"])
def test_other_families(name):
    target = wrap_target(tiny_model(name))
    expected = [output.token_ids for output in decode(target, None, PROMPTS, max_new_tokens=12)]
    drafter = Clasp(target, 1, every=1)
    outputs = decode(target, drafter, PROMPTS, max_new_tokens=12, lookahead=2, max_batch_rows=2)
    assert [output.token_ids for output in outputs] == expected


def test_a_choice_leaves_a_prompt_that_has_just_come_in_alone():
    """It takes the row of a shorter text at once: what was kept of that text's last token lies inside it."""
    prompts, counts = [prompt_ids(length, seed=length) for length in (5, 6, 60)], [4, 30, 12]
    expected = [output.token_ids for output in decode(TARGET, None, prompts, max_new_tokens=counts, ignore_eos=True)]
    drafter = Clasp(TARGET, 2, every=1)
    outputs = decode(TARGET, drafter, prompts, max_new_tokens=counts, ignore_eos=True, max_batch_rows=2)
    assert [output.token_ids for output in outputs] == expected


def told(outputs):
    return [(output.token_ids, [record.num_accepted for record in output.rounds]) for output in outputs]


def test_a_call_is_as_if_there_had_been_none_before_it():
    """Under `rejection` tokens depend on the drafts: what earlier calls chose must not decide them."""
    options = dict(max_new_tokens=20, ignore_eos=True, sampling=Sampling(temperature=1.0), seed=3)
    decoder = Decoder(TARGET, Clasp(TARGET, 2, every=3), max_batch_rows=2)
    first = told(decoder.decode(PROMPTS[1:], **options))
    decoder.decode([prompt_ids(3)], max_new_tokens=31)
    assert told(decoder.decode(PROMPTS[1:], **options)) == first


def test_one_drafter_serves_decoders_of_different_sizes():
    drafter, options = Clasp(TARGET, 2, every=2), dict(max_new_tokens=12, ignore_eos=True)
    decoders = [Decoder(TARGET, drafter, rows) for rows in (3, 2)]
    expected = [told(Decoder(TARGET, Clasp(TARGET, 2, every=2), rows).decode(PROMPTS, **options)) for rows in (3, 2)]
    for _ in range(2):
        assert [told(decoder.decode(PROMPTS, **options)) for decoder in decoders] == expected


def test_rows_share_a_prompt_prefix_as_without_a_draft():
    prompts = [prompt_ids(70, seed=1), [*prompt_ids(70, seed=1), 5, 6]]
    options = dict(max_new_tokens=3, ignore_eos=True)
    outputs = Decoder(TARGET, Clasp(TARGET, 2), cache="paged").decode(prompts, **options)
    expected = Decoder(TARGET, None, cache="paged").decode(prompts, **options)
    assert [output.num_reused_tokens for output in outputs] == [output.num_reused_tokens for output in expected]
    assert outputs[1].num_reused_tokens >= 69


def test_its_rounds_are_never_recorded(monkeypatch):
    """One recorded between two choices would never choose again."""
    monkeypatch.setattr(graphs, "can_be_captured", lambda rows, sampler: True)
    sampler = Sampler(build_transforms(Sampling(), None, TARGET.vocab_size), build_rule("auto", Sampling()))
    rounds = graphs.choose_rounds(Clasp(TARGET, 2), Rows(TARGET, 1, 64), sampler)
    assert isinstance(rounds, graphs.EagerRounds)


def chosen_from_scratch(target, text, num_skipped):
    """The published program on the last token of `text`, one state at a time on a cache of its own."""
    num, position = target.num_layers, len(text) - 1
    cache = target.make_cache(1, 128)
    pass_ = cache.open(torch.arange(len(text))[None], len(text))
    states = [target.embed(torch.tensor([text]))]
    for layer in range(num):
        states.append(target.run_layers(states[-1], layer, layer + 1, pass_))
    one = cache.open(torch.tensor([[position]]), position + 1)

    def item(layer):
        def run(states_WNM):
            return torch.cat([target.run_layers(state[None], layer, layer + 1, one) for state in states_WNM])

        return run

    inner = range(1, num - 1)
    truth = [states[layer][0, -1:] for layer in range(1, num)]
    found = best_skips([item(layer) for layer in inner], truth, [1] * len(inner), num_skipped)[-1]
    layers = [inner[index] for index in found.items]
    return SkipSet.of(layers, layers)


@pytest.mark.parametrize("num_drafted", [1, 4])  # narrower than the branches, and wider
@pytest.mark.parametrize("cache", ["contiguous", "paged"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_each_choice_is_that_of_the_text_so_far(fused, cache, num_drafted, monkeypatch):
    target = wrap_target(tiny_llama(num_layers=6, seed=2))
    if fused:
        assert fuse(target)
    drafter, sets = Clasp(target, 2, every=3), []
    propose = drafter._draft.propose

    def watched(rows, drafting):
        sets.append((drafter.skipped, int(rows.lengths_B[0])))
        return propose(rows, drafting)

    monkeypatch.setattr(drafter._draft, "propose", watched)
    (output,) = decode(
        target, drafter, [prompt_ids(9)], max_new_tokens=40, lookahead=num_drafted, ignore_eos=True, cache=cache
    )
    text = prompt_ids(9) + output.token_ids
    assert sets[0][0] == SkipSet() and len(sets) > 7
    with torch.inference_mode():
        for number, (skipped, length) in enumerate(sets[1:]):
            if number % 3 == 0:
                assert skipped == chosen_from_scratch(target, text[:length], 2), number
            else:
                assert skipped == sets[number][0], "between two choices the set stays"
    assert len({skipped for skipped, _ in sets}) > 2, "the text does change what is chosen"


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "needs num_skipped"),
        ({"num_skipped": 0}, r"num_skipped=0 is not possible with tiny: .* Allowed are 1 to 4"),
        ({"num_skipped": 5}, r"Allowed are 1 to 4"),
        ({"num_skipped": 2, "every": 0}, r"every=0 is not possible"),
        ({"num_skipped": 2, "sets": "x"}, r"no option 'sets'"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        build_drafter("clasp", TARGET, **options)
