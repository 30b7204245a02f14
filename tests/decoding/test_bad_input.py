"""Bad numbers, processors and settings through `decode`: an error that names prompt and position, a decoder that can be
used afterwards, never a token out of thin air, and no error that decoding without a draft would not have met.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch

from selfspec import Decoder, Sampling, UserError, build_drafter, decode, wrap_target
from selfspec.drafters import Draft
from tiny_models import tiny_llama

VOCAB = 16
PROMPTS = [[7, 4, 5, 3], [8, 4], [6, 6, 6, 6], [3, 4, 5, 3], [9, 8]]
BAD_PROMPT, BAD_LENGTH = 3, 7  # what is wrong is wrong behind the third generated token of the fourth prompt
DRAFTERS = ("none", "early_exit", "independent", "ngram")
RULES = {"greedy": (0.0, "auto"), **{name: (1.0, name) for name in ("rejection", "block", "coupled", "typical")}}


def name_of(value: object) -> str:
    """A test's name without addresses, which differ from worker to worker."""
    return str(value).partition(" at 0x")[0]


@functools.cache
def target():
    return wrap_target(tiny_llama(vocab_size=VOCAB, seed=2))


@functools.cache
def drafter(name):
    model = wrap_target(tiny_llama(vocab_size=VOCAB, seed=7, num_layers=2))
    options = {"early_exit": {"exit_layer": 2}, "independent": {"model": model}}
    return None if name == "none" else build_drafter(name, target(), **options.get(name, {}))


def at_the_bad_place(spoil):
    """A processor that spoils the scores of one prompt once it has reached a length."""

    def processor(input_ids, scores):
        here = input_ids[0, :4].tolist() == PROMPTS[BAD_PROMPT] and input_ids.shape[1] >= BAD_LENGTH
        return spoil(scores.clone()) if here else scores

    return processor


def set_third(value):
    return lambda scores: scores.index_fill(1, torch.tensor([3]), value)


def raises(scores):
    raise KeyError("no such state")


NUMBERS = {
    "nan": (set_third(math.nan), "the target's logits hold NaN"),
    "inf": (set_third(math.inf), r"the target's logits hold \+inf"),
    "nothing_left": (lambda scores: scores.fill_(-math.inf), "every token has been removed"),
}
BROKEN = {
    "shorter": (lambda scores: scores[:, :-1], r"function returned \(1, 15\).*\(1, 16\)"),
    "flat": (lambda scores: scores[0], r"function returned \(16,\)"),
    "nothing": (lambda scores: None, "function returned NoneType"),
    "raises": (raises, "function raised KeyError: 'no such state'"),
}


def call(decoder, rule="greedy", processors=None, **options):
    temperature, acceptance = RULES[rule]
    options = dict(max_new_tokens=9, lookahead=3, ignore_eos=True, seed=1) | options
    return decoder.decode(
        PROMPTS, sampling=Sampling(temperature=temperature), acceptance=acceptance, processors=processors, **options
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("fault", NUMBERS)
def test_bad_numbers_are_an_error_that_names_prompt_and_position(fault, name, rule):
    """Two rows for five prompts: the row of the batch is not the prompt's number."""
    spoil, message = NUMBERS[fault]
    decoder = Decoder(target(), drafter(name), max_batch_rows=2)
    good = [output.token_ids for output in call(decoder, rule)]
    events = []
    with pytest.raises(UserError, match=f"row {BAD_PROMPT}, position {BAD_LENGTH}: {message}"):
        call(decoder, rule, [at_the_bad_place(spoil)], on_round=events.append)
    emitted = [token for event in events if event.request.index == BAD_PROMPT for token in event.emitted_ids]
    assert emitted == good[BAD_PROMPT][: len(emitted)] and len(emitted) <= BAD_LENGTH - len(PROMPTS[BAD_PROMPT])
    assert [output.token_ids for output in call(decoder, rule)] == good, "the decoder is usable afterwards"


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("fault", BROKEN)
def test_a_processor_that_fails_is_an_error_that_names_prompt_and_position(fault, name):
    spoil, message = BROKEN[fault]
    decoder = Decoder(target(), drafter(name), max_batch_rows=2)
    good = [output.token_ids for output in call(decoder)]
    for rule in RULES:
        with pytest.raises(UserError, match=f"row {BAD_PROMPT}, position {BAD_LENGTH}: {message}") as caught:
            call(decoder, rule, [lambda ids, scores: scores, at_the_bad_place(spoil), lambda ids, scores: scores * 0])
        assert isinstance(caught.value.__cause__, KeyError) == (fault == "raises"), "the cause is not lost"
    assert [output.token_ids for output in call(decoder)] == good


@pytest.mark.parametrize("name", ["early_exit", "independent", "ngram"])
def test_a_processor_that_raises_behind_the_end_is_not_at_fault(name):
    """A grammar that has been completed has no next state: without a draft it is not asked again."""
    prompt, num_new = PROMPTS[0], 9

    def ends_with_the_output(input_ids, scores):
        if input_ids.shape[1] >= len(prompt) + num_new:
            raise KeyError("no such state")
        return scores

    for rule, (temperature, acceptance) in RULES.items():
        options = dict(sampling=Sampling(temperature=temperature), acceptance=acceptance, lookahead=5)
        options |= dict(max_new_tokens=num_new, processors=[ends_with_the_output], ignore_eos=True)
        output = decode(target(), drafter(name), [prompt], **options)[0]
        assert len(output.token_ids) == num_new and output.finish_reason == "length", rule


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
@pytest.mark.parametrize("name", [*DRAFTERS, "always_right"])
def test_what_lies_behind_the_length_limit_cannot_be_at_fault(name, rule, temperature):
    """Prompt and output use up all 16 tokens; a draft beyond the limit finds nothing left, and is not needed."""
    model = build_drafter("independent", target(), model=target()) if name == "always_right" else drafter(name)
    prompt = [3, 4, 5, 6, 7, 8, 9, 10, 11]
    sampling = Sampling(temperature=temperature, no_repeat_ngram_size=1)
    options = dict(sampling=sampling, acceptance=rule, ignore_eos=True, lookahead=5)
    output = decode(target(), model, [prompt], max_new_tokens=VOCAB - len(prompt), **options)[0]
    assert sorted([*prompt, *output.token_ids]) == list(range(VOCAB))
    assert math.isfinite(output.alpha_sum)
    with pytest.raises(UserError, match=f"row 0, position {VOCAB}: every token has been removed"):
        decode(target(), model, [prompt], max_new_tokens=VOCAB - len(prompt) + 1, **options)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", [*DRAFTERS, "always_right"])
def test_what_lies_behind_the_eos_cannot_be_at_fault(name, rule):
    temperature, acceptance = RULES[rule]
    model = build_drafter("independent", target(), model=target()) if name == "always_right" else drafter(name)
    options = dict(sampling=Sampling(temperature=temperature), acceptance=acceptance, seed=2, lookahead=4)
    free = decode(target(), None, [PROMPTS[0]], max_new_tokens=12, ignore_eos=True, **options)[0].token_ids
    eos = free[2]

    def nan_behind_eos(input_ids, scores):
        return scores * math.nan if eos in input_ids[0, len(PROMPTS[0]) :] else scores

    options |= dict(processors=[nan_behind_eos], eos_token_ids=[eos], max_new_tokens=200)
    output = decode(target(), model, [PROMPTS[0]], **options)[0]
    assert output.finish_reason == "eos" and output.token_ids.index(eos) == len(output.token_ids) - 1


@pytest.mark.parametrize("fault", ["number", "exception"])
@pytest.mark.parametrize("rule", ["greedy", "rejection", "block", "coupled"])
@pytest.mark.parametrize("name", ["early_exit", "independent", "ngram"])
def test_a_draft_that_the_target_forbids_leads_nowhere_and_is_no_error(name, rule, fault):
    """A grammar that has no state behind tokens it forbids: prompt lookup drafts them, p never emits them."""
    temperature, acceptance = RULES[rule]
    asked_beyond = []

    def grammar(input_ids, scores):
        if {5, 12} & set(input_ids[0, 4:].tolist()):
            asked_beyond.append(input_ids)
            if fault == "exception":
                raise KeyError("no such state")
            return scores * math.nan
        return scores.index_fill(1, torch.tensor([5, 12]), -math.inf)

    sampling = Sampling(temperature=temperature and 3.0)
    options = dict(sampling=sampling, acceptance=acceptance, ignore_eos=True, max_new_tokens=30, lookahead=4)
    for prompt in ([3, 4, 5, 3], [12, 5, 12, 5]):
        output = decode(target(), drafter(name), [prompt], processors=[grammar], **options)[0]
        assert len(output.token_ids) == 30 and not {5, 12} & set(output.token_ids)
    assert bool(asked_beyond) == (name == "ngram")


@pytest.mark.parametrize("rule", ["rejection", "coupled", "block", "typical"])
def test_the_smallest_temperature_there_may_be_is_as_good_as_greedy(rule):
    options = dict(max_new_tokens=9, lookahead=3, ignore_eos=True)
    cold = dict(sampling=Sampling(temperature=1e-30, top_p=0.9), acceptance=rule)
    greedy = decode(target(), None, PROMPTS, **options)
    for name in DRAFTERS:
        outputs = decode(target(), drafter(name), PROMPTS, **options, **cold)
        if rule != "typical":  # lossy
            assert [output.token_ids for output in outputs] == [output.token_ids for output in greedy]


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(temperature=-0.1), r"temperature=-0.1.*positive"),
        (dict(temperature=math.nan), "temperature=nan"),
        (dict(temperature=1e-38), r"temperature=1e-38.*0 \(greedy\) or at least 1e-30.*Use 0"),
        (dict(temperature=math.inf), "temperature=inf"),
        (dict(temperature="hot"), "temperature='hot'"),
        (dict(top_p=0.0), r"top_p=0.0.*\(0, 1\]"),
        (dict(top_p=-1.0), "top_p=-1.0"),
        (dict(top_p=1.5), "top_p=1.5"),
        (dict(top_k=-1), "top_k=-1"),
        (dict(top_k=2.5), "top_k=2.5"),
        (dict(min_p=-0.1), "min_p=-0.1"),
        (dict(min_p=1.1), "min_p=1.1"),
        (dict(repetition_penalty=0.0), "repetition_penalty=0.0"),
        (dict(repetition_penalty=-1.0), "repetition_penalty=-1.0"),
        (dict(presence_penalty=math.nan), "presence_penalty=nan"),
        (dict(frequency_penalty=math.inf), "frequency_penalty=inf"),
        (dict(no_repeat_ngram_size=-1), "no_repeat_ngram_size=-1"),
        (dict(suppress_tokens=(-1,)), r"suppress_tokens=\(-1,\)"),
        (dict(logit_bias={3: math.nan}), "logit_bias"),
        (dict(logit_bias={-3: 1.0}), "logit_bias"),
        (dict(logit_bias={VOCAB: 1.0}), rf"logit_bias names tokens \[{VOCAB}\].*{VOCAB}"),
    ],
    ids=name_of,
)
def test_bad_sampling_is_refused_before_anything_runs(settings, message):
    with pytest.raises(UserError, match=message):
        decode(target(), drafter("early_exit"), PROMPTS, sampling=Sampling(**settings))


@pytest.mark.parametrize(
    "options",
    [
        dict(seed=1.5), dict(seed=None), dict(seed="a"), dict(seed=True), dict(lookahead=None), dict(lookahead=[3]),
        dict(sampling=dict(temperature=0)), dict(eos_token_ids=2.0), dict(processors=lambda ids, scores: scores),
        dict(processors=[3]), dict(acceptance=None), dict(stop_strings=5), dict(prompts=None), dict(prompts=5),
        dict(prompts="a text"), dict(prompts=iter(PROMPTS)), dict(prompts={"a": PROMPTS[0]}),
    ],
    ids=name_of,
)  # fmt: skip
def test_arguments_of_the_wrong_kind_are_refused_by_name(options):
    with pytest.raises(UserError, match=next(iter(options))):
        decode(target(), drafter("early_exit"), **{"prompts": PROMPTS} | options)


def test_sizes_and_times_of_the_wrong_kind_are_refused_by_name():
    for options in (dict(capacity=-1), dict(capacity=2.5), dict(capacity="64"), dict(memory_limit_bytes="1 GB")):
        with pytest.raises(UserError, match=next(iter(options))):
            Decoder(target(), None, **options)
    with pytest.raises(UserError, match="arrivals_s=5 is not possible"):
        Decoder(target(), None).decode(PROMPTS, arrivals_s=5)
    for prompts, message in (([-5], "A prompt of -5 tokens"), ("text", "prompts is a list")):
        with pytest.raises(UserError, match=message):
            Decoder(target(), None).estimate(prompts)


@pytest.mark.parametrize("wrong", ["early_exit", 3, object()], ids=name_of)
def test_something_else_than_a_drafter_is_refused(wrong):
    with pytest.raises(UserError, match="drafter"):
        decode(target(), wrong, PROMPTS)


def test_a_drafter_built_for_another_target_is_refused():
    other = wrap_target(tiny_llama(vocab_size=VOCAB, seed=7))
    with pytest.raises(UserError, match="built for"):
        decode(target(), build_drafter("early_exit", other, exit_layer=2), PROMPTS)


class Lies:
    """Drafts with a q that breaks the contract."""

    name, max_drafted = "lies", None

    def __init__(self, q):
        self.q = q

    def start(self, rows):
        rows.draft_state = None

    def prefill(self, rows, seen):
        pass

    def propose(self, rows, drafting):
        num_drafted = drafting.plan.num_drafted
        tokens = torch.full((rows.num_rows, num_drafted), 4)
        rows.propose(0, tokens)
        q_BKV = self.q.expand(rows.num_rows, num_drafted, VOCAB).contiguous()
        return Draft(tokens, torch.full_like(rows.lengths_B, num_drafted), q_BKV)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize(
    "q, message",
    [
        (torch.full((VOCAB,), 0.5), "not a distribution"),
        (torch.full((VOCAB,), math.nan), "not a distribution"),
        (torch.full((VOCAB,), 2 / VOCAB) * torch.tensor([1.0, -1.0] * (VOCAB // 2)) + 1 / VOCAB, "not a distribution"),
        (torch.nn.functional.one_hot(torch.tensor(5), VOCAB).float(), "drafted token has probability 0"),
    ],
    ids=["sums_to_8", "nan", "negative", "impossible_draft"],
)
def test_a_q_that_is_none_is_refused_with_the_position(q, message, rule):
    with pytest.raises(UserError, match=rf"row 0, position \d+: .*{message}"):
        decode(target(), Lies(q), [PROMPTS[0]], sampling=Sampling(temperature=1.0), acceptance=rule)
