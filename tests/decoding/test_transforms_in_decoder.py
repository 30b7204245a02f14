"""Transforms that look at the tokens so far, inside speculation: each drafted position sees the prefix it would see
without, so greedy tokens stay `model.generate`'s and coupled samples the autoregressive ones, under every transform.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from transformers.generation import logits_process as hf

from selfspec import Decoder, Sampling, build_drafter, decode, wrap_target
from tiny_models import prompt_ids, tiny_llama

pytestmark = pytest.mark.usefixtures("small_chunks")

VOCAB, NEW_TOKENS = 24, 12  # few tokens: penalties and forbidden n-grams bite at once
LENGTHS = (9, 1, 67, 2)  # ragged; one token; more than one prefill chunk
PROMPTS = [prompt_ids(length, seed=length, vocab_size=VOCAB) for length in LENGTHS]
EOS = 7  # generated early and often


@functools.cache
def target():
    return wrap_target(tiny_llama(vocab_size=VOCAB, seed=3))


@functools.cache
def drafter(name):
    make = {
        "first_layer": lambda: build_drafter("early_exit", target(), exit_layer=1),
        "last_layer_but_one": lambda: build_drafter("early_exit", target(), exit_layer=3),
        "independent": lambda: build_drafter(
            "independent", target(), model=wrap_target(tiny_llama(vocab_size=VOCAB, seed=5, num_layers=2))
        ),
        "always_right": lambda: build_drafter("independent", target(), model=target()),
        "ngram": lambda: build_drafter("ngram", target()),
    }
    return make[name]()


DRAFTERS = ("first_layer", "last_layer_but_one", "independent", "always_right", "ngram")


class AvoidsTheRecent(hf.LogitsProcessor):
    """Prefix-dependent: lowers the last three tokens, and forbids the one of four tokens ago."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[0, input_ids[0, -3:]] -= 4.0
        if input_ids.shape[1] >= 4:
            scores[0, input_ids[0, -4]] = -math.inf
        return scores


class CountsToSeven(hf.LogitsProcessor):
    """Depends on the length alone: every seventh token must be 5."""

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] % 7:
            return scores
        return torch.full_like(scores, -math.inf).index_fill(1, torch.tensor([5]), 0.0)


# name -> what decode is given, and what generate is given (None: transformers has no such setting)
STATEFUL = {
    "repetition": (dict(repetition_penalty=1.7), dict(repetition_penalty=1.7)),
    "repetition_below_one": (dict(repetition_penalty=0.6), dict(repetition_penalty=0.6)),
    "no_repeat_1": (dict(no_repeat_ngram_size=1), None),  # runs out of tokens, and generate then makes some up
    "no_repeat_2": (dict(no_repeat_ngram_size=2), dict(no_repeat_ngram_size=2)),
    "no_repeat_3": (dict(no_repeat_ngram_size=3), dict(no_repeat_ngram_size=3)),
    "presence": (dict(presence_penalty=4.0), None),
    "frequency": (dict(frequency_penalty=2.5), None),
    "suppress_and_bias": (
        dict(suppress_tokens=(11, 20), logit_bias={6: 3.0, 4: -math.inf}),
        dict(suppress_tokens=[11, 20], sequence_bias=[[[6], 3.0], [[4], -math.inf]]),
    ),
    "recent": (dict(processors=(AvoidsTheRecent(),)), dict(logits_processor=[AvoidsTheRecent()])),
    "length": (dict(processors=(CountsToSeven(),)), dict(logits_processor=[CountsToSeven()])),
    "bad_words": (
        dict(processors=(hf.NoBadWordsLogitsProcessor([[20], [16, 7]], eos_token_id=EOS),)),
        dict(bad_words_ids=[[20], [16, 7]]),
    ),
    "everything": (
        dict(
            repetition_penalty=1.3, no_repeat_ngram_size=3, suppress_tokens=(11,), logit_bias={6: 2.0},
            processors=(AvoidsTheRecent(),),
        ),
        dict(
            repetition_penalty=1.3, no_repeat_ngram_size=3, suppress_tokens=[11], sequence_bias=[[[6], 2.0]],
            logits_processor=[AvoidsTheRecent()],
        ),
    ),
}  # fmt: skip
SAMPLED = {
    "temperature": {},
    "top_k": dict(top_k=4),
    "top_p": dict(top_p=0.8),
    "min_p": dict(min_p=0.1),
    **{name: given for name, (given, _) in STATEFUL.items() if name != "no_repeat_1"},
}


def run(name, given, temperature=0.0, prompts=PROMPTS, **options):
    given = dict(given)
    processors = given.pop("processors", None)
    options = dict(max_new_tokens=NEW_TOKENS, ignore_eos=True, processors=processors) | options
    sampling = Sampling(temperature=temperature, **given)
    return decode(target(), name and drafter(name), prompts, sampling=sampling, **options)


def tokens_of(outputs):
    return [output.token_ids for output in outputs]


@functools.cache
def greedy(transform):
    short = PROMPTS[:2] if transform == "no_repeat_1" else PROMPTS  # 9 + 12 tokens, all different, are just possible
    return tokens_of(run(None, STATEFUL[transform][0], prompts=short))


def generated(prompt, settings, max_new_tokens=NEW_TOKENS, eos=None):
    ids = torch.tensor([prompt])
    fixed = dict(max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=eos, pad_token_id=0)
    return target().hf_model.generate(ids, **fixed, **settings)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("transform", [name for name, (_, settings) in STATEFUL.items() if settings is not None])
def test_greedy_tokens_without_a_draft_are_generates(transform):
    assert greedy(transform) == [generated(prompt, STATEFUL[transform][1]) for prompt in PROMPTS]


@pytest.mark.parametrize("transform", STATEFUL)
def test_each_transform_changes_something(transform):
    """Or the tests of this module would pass for the wrong reason."""
    assert greedy(transform) != tokens_of(run(None, {}))[: len(greedy(transform))]


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("transform", STATEFUL)
def test_greedy_tokens_of_a_draft_are_those_without_one(transform, name):
    expected = greedy(transform)
    for num_drafted in (1, 2, 3, 4, 5):
        options = dict(lookahead=num_drafted, max_batch_rows=1 + num_drafted % 3, prompts=PROMPTS[: len(expected)])
        assert tokens_of(run(name, STATEFUL[transform][0], **options)) == expected, num_drafted


@functools.cache
def coupled(transform):
    return tokens_of(run(None, SAMPLED[transform], temperature=0.9, acceptance="coupled", seed=5))


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("transform", SAMPLED)
def test_coupled_samples_of_a_draft_are_those_without_one(transform, name):
    for num_drafted, rows in ((1, 3), (4, 2)):
        options = dict(temperature=0.9, acceptance="coupled", seed=5, lookahead=num_drafted, max_batch_rows=rows)
        assert tokens_of(run(name, SAMPLED[transform], **options)) == coupled(transform), num_drafted


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("name", ["last_layer_but_one", "independent", "ngram"])
def test_samples_do_not_depend_on_the_batch(name, rule):
    options = dict(temperature=0.9, acceptance=rule, seed=5, lookahead=3)
    alone = tokens_of(run(name, SAMPLED["everything"], max_batch_rows=1, **options))
    for rows in (2, 5):
        assert tokens_of(run(name, SAMPLED["everything"], max_batch_rows=rows, **options)) == alone


def test_warpers_do_nothing_at_temperature_zero():
    plain = tokens_of(run(None, {}))
    assert tokens_of(run(None, dict(top_k=2, top_p=0.1, min_p=0.9))) == plain
    assert tokens_of(run("first_layer", dict(top_k=2, top_p=0.1, min_p=0.9), lookahead=3)) == plain


@pytest.mark.parametrize("name", [None, *DRAFTERS])
def test_a_minimum_length_moves_the_eos_and_drafts_run_past_it(name):
    """EOS is suppressed up to a length that lies inside runs, then ends rows at different times."""
    ended = 0
    for min_length in (5, 12, 19):
        settings = dict(min_length=min_length)
        expected = [generated(prompt, settings, 24, eos=EOS) for prompt in PROMPTS]
        given = dict(processors=(hf.MinLengthLogitsProcessor(min_length, EOS),))
        options = dict(max_new_tokens=24, ignore_eos=False, eos_token_ids=[EOS], max_batch_rows=3)
        for num_drafted in (1, 3, 5):
            outputs = run(name, given, lookahead=num_drafted, **options)
            assert tokens_of(outputs) == expected, (min_length, num_drafted)
            ended += sum(output.finish_reason == "eos" for output in outputs)
    assert ended > 10


@pytest.mark.parametrize("name", [None, *DRAFTERS])
def test_a_minimum_of_new_tokens_and_a_forced_eos(name):
    prompt = PROMPTS[0]
    for min_new in (1, 2, 5, 9, 12):
        settings = dict(min_new_tokens=min_new, forced_eos_token_id=EOS)
        expected = generated(prompt, settings, eos=EOS)
        processors = (
            hf.MinNewTokensLengthLogitsProcessor(len(prompt), min_new, EOS),
            hf.ForcedEOSTokenLogitsProcessor(len(prompt) + NEW_TOKENS, EOS),
        )
        options = dict(prompts=[prompt], ignore_eos=False, eos_token_ids=EOS)
        for num_drafted in (1, 2, 4):
            output = run(name, dict(processors=processors), lookahead=num_drafted, **options)[0]
            assert output.token_ids == expected and output.token_ids[-1] == EOS and output.finish_reason == "eos"


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_processor_sees_every_prefix_of_the_output_and_no_stale_token(name):
    """The second call reuses the rows of a longer one, whose tokens still lie behind the shorter prompts."""
    seen = set()

    def spy(input_ids, scores):
        seen.add(tuple(input_ids[0].tolist()))
        return scores

    decoder = Decoder(target(), drafter(name), max_batch_rows=2)
    decoder.decode([PROMPTS[2]] * 2, max_new_tokens=20, ignore_eos=True)
    prompts = PROMPTS[:2]
    options = dict(max_new_tokens=NEW_TOKENS, lookahead=3, ignore_eos=True)
    outputs = decoder.decode(prompts, processors=[spy], **options)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert all((*prompt, *output.token_ids[:n]) in seen for n in range(NEW_TOKENS))
    assert all(any(prefix[: len(prompt)] == tuple(prompt) for prompt in prompts) for prefix in seen)
    longest = max(map(len, prompts)) + NEW_TOKENS + 3
    assert all(len(prefix) <= longest for prefix in seen)
