"""Criteria, processors and streamers inside `generate` are shown, with speculation, what they are shown without."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from hf_calls import NEW, PROMPT, VOCAB, ParityOfPrefix, Puts, Seen, drafters, free_run, left_padded, model, ours, plain
from transformers import LogitsProcessor, TextIteratorStreamer
from transformers.generation import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import selfspec
from selfspec import Sampling, UserError
from selfspec import hf as hf_module
from selfspec.target.byte_tokenizer import byte_tokenizer
from tiny_models import tiny_mistral

STOPS = {
    "each_row_at_its_token": lambda ids: ids[:, -1] % 5 == 0,
    "all_rows_when_one_says_so": lambda ids: bool(ids[0, -1] % 5 == 0),  # a bool ends every row
    "only_with_others_in_sight": lambda ids: (ids[:, -1].sum() % 7 == 0).expand(len(ids)),
    "never": lambda ids: torch.zeros(len(ids), dtype=torch.bool),
}


@pytest.mark.parametrize("eos", [None, 11])
@pytest.mark.parametrize("drafter", ["none", "name", "always_right", "other_model"])
@pytest.mark.parametrize("stop", sorted(STOPS))
def test_criteria_are_shown_every_committed_token_and_cut_where_generate_cuts(stop, drafter, eos):
    for inputs in (dict(), left_padded()):
        theirs, mine = Seen(STOPS[stop]), Seen(STOPS[stop])
        expected = plain(**inputs, stopping_criteria=[theirs], eos_token_id=eos)
        result = ours(**inputs, drafter=drafter, stopping_criteria=[mine], eos_token_id=eos)
        assert torch.equal(result, expected)
        assert mine.seen == theirs.seen


def test_a_criterion_cuts_at_every_offset_inside_an_accepted_run():
    for count in range(1, 12):
        stop = Seen(lambda ids, count=count: ids[:, -1] == free_run()[count - 1])
        assert torch.equal(ours(lookahead=4, stopping_criteria=[stop]), plain(stopping_criteria=[stop]))


def test_stop_strings_end_where_generate_ends_them_also_across_tokens():
    tokenizer = byte_tokenizer()
    text = [tokenizer.decode([token]) for token in free_run()]
    pairs = [at for at in range(1, NEW - 1) if (text[at] + text[at + 1]).isascii() and text[at] + text[at + 1] != "  "]
    assert pairs, "the model writes some ASCII"
    for at in pairs:
        options = dict(stop_strings=["§never§", text[at] + text[at + 1]], tokenizer=tokenizer)
        expected = plain(**options)
        assert expected.shape[1] < PROMPT.shape[1] + NEW
        for drafter in ("none", "always_right", "first_layer"):
            assert torch.equal(ours(drafter=drafter, **options), expected)
    assert torch.equal(ours(**left_padded(), **options), plain(**left_padded(), **options))


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(stop_strings=["x"]), "stop_strings need tokenizer"),
        (dict(stop_strings=[""], tokenizer=byte_tokenizer()), "non-empty"),
        (dict(stop_strings=[], tokenizer=byte_tokenizer()), "non-empty"),
    ],
)
def test_bad_stop_strings_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        ours(**options)


# ---------------------------------------------------------------- processors


class Grammar(LogitsProcessor):
    """Each generated token must be larger than the one before, modulo a jump; meets an illegal prefix with an error."""

    def __init__(self):
        self.calls = 0

    def allowed(self, last):
        return (torch.arange(VOCAB) - last) % VOCAB < 40

    def __call__(self, input_ids, scores):
        self.calls += 1
        for before, last in zip(input_ids[0, 5:], input_ids[0, 6:], strict=False):
            assert self.allowed(before)[last], "a prefix that cannot come to be without speculation"
        return scores.masked_fill(~self.allowed(input_ids[0, -1]), -torch.inf)


@pytest.mark.parametrize("drafter", ["none", "name", "first_layer", "always_right"])
def test_no_processor_sees_a_prefix_that_its_own_rules_exclude(drafter):
    ids = torch.tensor([[200, 9, 30, 9, 30, 9]])  # prompt lookup drafts 30 after 9, again and again
    expected = plain(ids, logits_processor=[Grammar()])
    assert torch.equal(ours(ids, drafter=drafter, logits_processor=[Grammar()]), expected)


def test_a_processor_that_changes_the_shape_is_named_with_its_position():
    def half(ids, scores):
        return scores[:, : VOCAB // 2]

    with pytest.raises(UserError, match=r"position 6: function returned \(1, 128\).*\(1, 256\)"):
        ours(logits_processor=[half])


def test_processors_and_criteria_get_plain_tensors_they_may_keep():
    kept = []

    def keep(ids, scores):
        kept.append(scores)
        return scores

    stop = Seen(lambda ids: kept.append(ids) or torch.zeros(len(ids), dtype=torch.bool))
    result = ours(logits_processor=[keep], stopping_criteria=[stop])
    assert kept and not any(tensor.is_inference() for tensor in [*kept, result])


def test_a_tail_of_warpers_moves_into_sampling_and_nothing_else_does():
    temperature, top_k, top_p, min_p = (
        TemperatureLogitsWarper(0.5), TopKLogitsWarper(9), TopPLogitsWarper(0.8), MinPLogitsWarper(0.1),
    )  # fmt: skip
    custom = ParityOfPrefix()
    split = hf_module._split
    assert split([custom, temperature, top_k, top_p, min_p], True) == (Sampling(0.5, 0.8, 9, 0.1), [custom])
    assert split([custom, top_k], True) == (Sampling(1.0, top_k=9), [custom])
    assert split([top_k, temperature], True) == (Sampling(0.5), [top_k])  # not the order of Sampling
    assert split([temperature, temperature], True) == (Sampling(0.5), [temperature])
    assert split([top_p, custom], True) == (Sampling(1.0), [top_p, custom])
    assert split([TopPLogitsWarper(0.8, min_tokens_to_keep=3)], True)[0] == Sampling(1.0)
    assert split([temperature, top_k], False) == (Sampling(), [temperature, top_k])


# ---------------------------------------------------------------- streamers and the returned dict


@pytest.mark.parametrize("drafter", ["none", "name", "always_right"])
def test_a_streamer_gets_the_same_puts_as_from_generate(drafter):
    for inputs in (dict(), left_padded()):
        theirs, mine, bound = Puts(), Puts(), Puts()
        expected = plain(**inputs, streamer=theirs, eos_token_id=11)
        ours(**inputs, drafter=drafter, streamer=mine, eos_token_id=11)
        function = functools.partial(selfspec.hf_generate, streamer=bound)
        plain(**inputs, custom_generate=function, drafter=drafters()[drafter], eos_token_id=11)
        assert mine.events == bound.events == theirs.events
        assert [token for puts, *_ in mine.events[1:-1] for token in puts[:1]] == expected[
            0, -len(mine.events) + 2 :
        ].tolist()


def test_a_text_iterator_streamer_ends_in_the_thread_that_reads_it():
    tokenizer = byte_tokenizer()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = threading.Thread(target=ours, kwargs=dict(streamer=streamer))
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(free_run())


KEPT = dict(return_dict_in_generate=True, output_scores=True, output_logits=True)


@pytest.mark.parametrize("options", [dict(), dict(suppress_tokens=[1, 2], eos_token_id=11), dict(output_logits=False)])
@pytest.mark.parametrize("drafter", ["none", "first_layer", "always_right"])
def test_the_returned_dict_holds_what_generate_returns(drafter, options):
    expected = plain(**KEPT | options)
    result = ours(drafter=drafter, **KEPT | options)
    assert type(result) is type(expected) and list(result) == list(expected)
    assert torch.equal(result.sequences, expected.sequences)
    for name in {"scores", "logits"} & set(expected):
        for mine, theirs in zip(result[name], expected[name], strict=True):
            assert mine.dtype == theirs.dtype and mine.shape == theirs.shape and not mine.is_inference()
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("drafter", ["none", "first_layer", "always_right"])
def test_the_scores_of_sampled_tokens_are_those_they_were_drawn_from(drafter):
    result = ours(drafter=drafter, do_sample=True, seed=3, temperature=0.7, top_k=20, **KEPT)
    with torch.no_grad():
        logits_TV = model()(result.sequences).logits[0, PROMPT.shape[1] - 1 : -1]
    torch.testing.assert_close(torch.cat(result.logits), logits_TV, atol=1e-4, rtol=1e-4)
    scores_TV = TopKLogitsWarper(20)(None, TemperatureLogitsWarper(0.7)(None, logits_TV))
    torch.testing.assert_close(torch.cat(result.scores), scores_TV, atol=1e-3, rtol=1e-3)


def cache_of(result):
    return next(value for name, value in result.items() if name in hf_module.CACHE_NAMES)


def test_the_returned_cache_is_generates_and_carries_the_next_turn():
    for name, subject in (("llama", model()), ("mistral", tiny_mistral(vocab_size=VOCAB, seed=2))):
        options = dict(max_new_tokens=15, eos_token_id=None, return_dict_in_generate=True)
        expected = subject.generate(PROMPT, **options)
        drafter = {"kind": "early_exit", "exit_layer": 2}
        result = subject.generate(PROMPT, custom_generate=selfspec.hf_generate, drafter=drafter, **options)
        for mine, theirs in zip(cache_of(result).layers, cache_of(expected).layers, strict=True):
            torch.testing.assert_close(mine.keys, theirs.keys, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(mine.values, theirs.values, atol=1e-4, rtol=1e-4)
        turn = torch.cat([result.sequences, torch.tensor([[5, 8, 13]])], 1)
        again = dict(max_new_tokens=9, eos_token_id=None, past_key_values=cache_of(result))
        assert torch.equal(
            subject.generate(turn, **again), subject.generate(turn, max_new_tokens=9, eos_token_id=None)
        ), name


def test_the_returned_cache_of_a_left_padded_batch_carries_the_next_turn():
    asked = dict(return_dict_in_generate=True, max_new_tokens=8)
    result = ours(**left_padded(), **asked)
    turn = torch.cat([result.sequences, torch.full((3, 2), 17)], 1)
    mask = torch.nn.functional.pad(left_padded()["attention_mask"], (0, 10), value=1)
    expected = plain(turn, attention_mask=mask)
    assert torch.equal(plain(turn, attention_mask=mask, past_key_values=cache_of(result)), expected)


def test_criteria_see_the_scores_when_they_are_kept():
    theirs, mine = Seen(), Seen()
    asked = dict(return_dict_in_generate=True, output_scores=True)
    plain(stopping_criteria=[theirs], **asked)
    ours(stopping_criteria=[mine], **asked)
    assert mine.seen == theirs.seen and mine.seen[-1][1] == NEW
