"""Inside transformers' `generate`: the same tokens, hooks that see the same things, refusals by name, a model left as
it was.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import threading
import weakref

import pytest
import torch
from scipy.stats import chisquare
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, StoppingCriteria, TextIteratorStreamer
from transformers.generation import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    WatermarkingConfig,
)

import selfspec
from selfspec import Sampling, UserError, build_drafter, wrap_target
from selfspec import hf as hf_module
from selfspec.target.byte_tokenizer import byte_tokenizer
from tiny_models import prompt_ids, tiny_llama, tiny_mistral

VOCAB = 256
PROMPT = torch.tensor([prompt_ids(6, vocab_size=VOCAB)])
NEW = 24


@functools.cache
def model():
    """A byte-level model whose greedy text is varied."""
    return tiny_llama(vocab_size=VOCAB, seed=1)


@functools.cache
def drafters():
    target = wrap_target(model())
    return {
        "none": None,
        "name": "ngram",
        "mapping": {"kind": "early_exit", "exit_layer": 2},
        "first_layer": build_drafter("early_exit", target, exit_layer=1),
        "always_right": build_drafter("independent", target, model=target),
        "other_model": build_drafter("independent", target, model=wrap_target(tiny_llama(vocab_size=VOCAB, seed=5))),
    }


def plain(ids=PROMPT, **options):
    return model().generate(ids, **{"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0} | options)


def ours(ids=PROMPT, drafter="always_right", **options):
    chosen = drafters().get(drafter, drafter) if isinstance(drafter, str) else drafter
    return plain(ids, custom_generate=selfspec.hf_generate, drafter=chosen, **options)


@functools.cache
def free_run():
    return plain()[0, PROMPT.shape[1] :].tolist()


@functools.cache
def left_padded():
    """Three prompts of different lengths, padded on the left with an id that also is an ordinary token."""
    prompts = [prompt_ids(length, seed=length, vocab_size=VOCAB) for length in (9, 2, 5)]
    ids = torch.tensor([[7] * (9 - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (9 - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"ids": ids, "attention_mask": mask}


class ParityOfPrefix(LogitsProcessor):
    """Forbids even or odd tokens, by the sum of everything so far (padding counts, as in generate)."""

    def __call__(self, input_ids, scores):
        tokens = torch.arange(scores.shape[1]) % 2
        return scores.masked_fill(tokens == input_ids.sum(1, keepdim=True) % 2, -torch.inf)


class ByRow(LogitsProcessor):
    """Tells rows apart by their index: row b may only use tokens that leave b + 1 modulo 7."""

    def __call__(self, input_ids, scores):
        allowed = torch.arange(scores.shape[1]) % 7 == torch.arange(len(scores))[:, None] + 1
        return scores.masked_fill(~allowed, -torch.inf)


class InPlace(LogitsProcessor):
    """A careless one: writes into what it was given."""

    def __call__(self, input_ids, scores):
        scores[:, input_ids[0, -1]] -= 20.0
        return scores


def some(count, first=0):
    """Ids that the model does generate."""
    return free_run()[first : first + count]


OPTIONS = {
    "max_new_tokens": lambda: dict(max_new_tokens=13),
    "max_length": lambda: dict(max_new_tokens=None, max_length=20),
    "default_length": lambda: dict(max_new_tokens=None),
    "eos_token_id": lambda: dict(eos_token_id=some(1, 9)[0]),
    "several_eos": lambda: dict(eos_token_id=[*some(1, 15), *some(1, 7)]),
    "min_new_tokens": lambda: dict(eos_token_id=some(1, 3)[0], min_new_tokens=9),
    "min_length": lambda: dict(eos_token_id=some(1, 3)[0], min_length=14),
    "forced_eos_token_id": lambda: dict(forced_eos_token_id=5),
    "repetition_penalty": lambda: dict(repetition_penalty=1.8),
    "no_repeat_ngram_size": lambda: dict(no_repeat_ngram_size=1),
    "encoder_repetition_penalty": lambda: dict(encoder_repetition_penalty=3.0),
    "suppress_tokens": lambda: dict(suppress_tokens=some(3)),
    "begin_suppress_tokens": lambda: dict(begin_suppress_tokens=some(1)),
    "sequence_bias": lambda: dict(sequence_bias={(some(1)[0],): -9.0, tuple(some(2, 2)): -9.0}),
    "bad_words_ids": lambda: dict(bad_words_ids=[some(2, 1), some(1, 6)]),
    "exponential_decay": lambda: dict(eos_token_id=5, exponential_decay_length_penalty=(4, 1.9)),
    "prefix_allowed_tokens_fn": lambda: dict(prefix_allowed_tokens_fn=lambda row, ids: range(row, VOCAB, 3)),
    "renormalize_logits": lambda: dict(renormalize_logits=True, suppress_tokens=some(2)),
    "processors": lambda: dict(logits_processor=LogitsProcessorList([ParityOfPrefix(), InPlace()])),
    "processor_by_row": lambda: dict(logits_processor=[ByRow()]),
    "all_together": lambda: dict(
        repetition_penalty=1.3,
        no_repeat_ngram_size=2,
        suppress_tokens=some(2),
        logits_processor=[ParityOfPrefix()],
        eos_token_id=[*some(1, 5), 11],
        min_new_tokens=4,
    ),
    "use_cache": lambda: dict(use_cache=False, logits_processor=[ParityOfPrefix()]),
    "generation_config": lambda: dict(
        max_new_tokens=None,
        eos_token_id=None,
        generation_config=GenerationConfig(max_length=17, suppress_tokens=some(2)),
    ),
}


@pytest.mark.parametrize(
    "drafter, num_drafted",
    [("none", 4), ("name", 4), ("mapping", 1), ("first_layer", 3), ("always_right", 5), ("other_model", 2)],
)
@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_greedy_tokens_equal_generate_with_every_option(option, drafter, num_drafted):
    options = OPTIONS[option]()
    expected = plain(**options)
    assert expected[0].tolist() != plain()[0].tolist(), "an option without effect tests nothing"
    assert torch.equal(ours(drafter=drafter, lookahead=num_drafted, **options), expected)


@pytest.mark.parametrize("drafter", ["name", "first_layer", "always_right"])
@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_left_padded_rows_equal_generate_with_every_option(option, drafter):
    options = OPTIONS[option]() | left_padded()
    expected = plain(**options)
    assert torch.equal(ours(drafter=drafter, lookahead=3, **options), expected)


def test_rows_that_end_early_are_padded_on_the_right_as_generate_does():
    free = plain(**left_padded())[:, 9:].tolist()
    eos = [free[0][2], free[1][11], free[2][6]]
    for pad in (0, 9):
        expected = plain(**left_padded(), eos_token_id=eos, pad_token_id=pad)
        assert expected.shape[1] < 9 + NEW and (expected[0, 12:] == pad).all()
        for drafter in drafters():
            assert torch.equal(ours(drafter=drafter, **left_padded(), eos_token_id=eos, pad_token_id=pad), expected)


def test_a_mask_inferred_from_padding_ids_is_honoured():
    ids = torch.where(left_padded()["attention_mask"] == 1, left_padded()["ids"], 0)
    assert torch.equal(ours(ids, drafter="first_layer"), plain(ids))
    assert torch.equal(ours(ids, drafter="first_layer"), plain(ids, attention_mask=left_padded()["attention_mask"]))


def test_a_sliding_window_counts_from_the_first_token_of_a_left_padded_row():
    windowed = tiny_mistral(vocab_size=VOCAB, seed=2)
    options = dict(max_new_tokens=20, eos_token_id=None, attention_mask=left_padded()["attention_mask"])
    expected = windowed.generate(left_padded()["ids"], **options)
    options |= dict(custom_generate=selfspec.hf_generate, drafter={"kind": "early_exit", "exit_layer": 2})
    assert torch.equal(windowed.generate(left_padded()["ids"], **options), expected)


# ---------------------------------------------------------------- stopping


class Seen(StoppingCriteria):
    """Remembers what it is shown, and never or sometimes ends a row."""

    def __init__(self, stop=lambda ids: torch.zeros(len(ids), dtype=torch.bool)):
        self.stop, self.seen = stop, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append((input_ids.tolist(), scores is None or len(scores)))
        return self.stop(input_ids)


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


class Puts:
    def __init__(self):
        self.events = []

    def put(self, value):
        self.events.append((value.tolist(), value.device.type, value.dtype))

    def end(self):
        self.events.append("end")


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


# ---------------------------------------------------------------- sampling


@pytest.mark.parametrize("num_drafted", [1, 4])
@pytest.mark.parametrize("drafter", ["name", "first_layer", "always_right", "other_model"])
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(temperature=0.7, top_k=0, top_p=0.9, min_p=0.05),
        dict(typical_p=0.9, repetition_penalty=1.2),
        dict(logits_processor=[ParityOfPrefix()], top_k=5),
    ],
)
def test_coupled_sampling_does_not_depend_on_the_drafter(drafter, num_drafted, options):
    options = dict(do_sample=True, acceptance="coupled", seed=7, **options)
    for inputs in (dict(), left_padded()):
        expected = ours(drafter="none", **inputs, **options)
        assert torch.equal(ours(drafter=drafter, lookahead=num_drafted, **inputs, **options), expected)
        assert not torch.equal(ours(drafter=drafter, **inputs, **{**options, "seed": 8}), expected)


def test_the_generation_configs_own_top_k_of_50_is_in_force():
    target = wrap_target(model())
    settings = dict(max_new_tokens=NEW, acceptance="coupled", seed=3, ignore_eos=True)
    sampled = selfspec.decode(target, None, PROMPT.tolist(), sampling=Sampling(temperature=1.0, top_k=50), **settings)
    result = ours(do_sample=True, acceptance="coupled", seed=3)
    assert result[0, PROMPT.shape[1] :].tolist() == sampled[0].token_ids


def test_without_a_seed_torchs_own_decides_as_in_generate():
    def sampled(torch_seed, **options):
        torch.manual_seed(torch_seed)
        return [ours(do_sample=True, **options).tolist() for _ in range(2)]

    assert sampled(1) == sampled(1) and sampled(1) != sampled(2) and sampled(1)[0] != sampled(1)[1]
    before = torch.get_rng_state()
    ours(do_sample=True, seed=5)
    ours()
    assert torch.equal(torch.get_rng_state(), before)  # greedy and seeded calls leave it alone


FALSE_ALARM_RATE = 1e-4  # of each comparison; the seed is fixed, so the outcome is always the same
NUM_SAMPLES = 1000
WARPED = dict(temperature=1.5, top_k=12, top_p=0.95)


@functools.cache
def exact_marginals():
    """p of the first and of the second generated token, by transformers' own forward and warpers."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(1.5), TopKLogitsWarper(12), TopPLogitsWarper(0.95)])
    with torch.no_grad():
        first_V = warpers(PROMPT, model()(PROMPT).logits[:, -1]).softmax(-1)[0].double()
        continued = torch.cat([PROMPT.expand(VOCAB, -1), torch.arange(VOCAB)[:, None]], 1)
        second_VV = warpers(continued, model()(continued).logits[:, -1]).softmax(-1).double()
    return [first_V, first_V @ second_VV]


def p_value(samples, p_V):
    """Pearson's test, categories expected fewer than five times pooled; an impossible token is a certain failure."""
    counts_V = torch.bincount(samples, minlength=VOCAB).double()
    if counts_V[p_V == 0].any():
        return 0.0
    expected_V = p_V * len(samples)
    rare_V = expected_V < 5
    counts = [*counts_V[~rare_V].tolist(), float(counts_V[rare_V].sum())]
    expected = [*expected_V[~rare_V].tolist(), float(expected_V[rare_V].sum())]
    if expected[-1] == 0:
        counts, expected = counts[:-1], expected[:-1]
    return chisquare(counts, [len(samples) * share / sum(expected) for share in expected]).pvalue


@pytest.mark.parametrize(
    "drafter, acceptance", [("first_layer", "rejection"), ("other_model", "coupled"), ("other_model", "block")]
)
def test_sampled_tokens_follow_the_distribution_of_generate(drafter, acceptance):
    options = dict(do_sample=True, **WARPED, max_new_tokens=2, num_return_sequences=NUM_SAMPLES, seed=0, lookahead=2)
    result = ours(drafter=drafter, acceptance=acceptance, **options)
    for place, p_V in enumerate(exact_marginals()):
        samples = result[:, PROMPT.shape[1] + place]
        assert p_value(samples, p_V) > FALSE_ALARM_RATE
        unwarped_V = model()(PROMPT).logits[0, -1].double().softmax(-1) if place == 0 else exact_marginals()[0]
        assert p_value(samples, unwarped_V.detach()) < FALSE_ALARM_RATE  # the negative control


def test_a_lossy_rule_says_so():
    with pytest.warns(UserWarning, match="acceptance='typical' is lossy"):
        ours(do_sample=True, acceptance="typical", seed=1)


# ---------------------------------------------------------------- refusals


def user_cache():
    return DynamicCache(config=model().config)


REFUSALS = {
    "num_beams": lambda: dict(num_beams=2),
    "penalty_alpha": lambda: dict(penalty_alpha=0.6, top_k=4),
    "dola_layers": lambda: dict(dola_layers="low"),
    "constraints": lambda: dict(constraints=[object()]),
    "force_words_ids": lambda: dict(force_words_ids=[[5]]),
    "prompt_lookup_num_tokens": lambda: dict(prompt_lookup_num_tokens=3),
    "assistant_early_exit": lambda: dict(assistant_early_exit=1),
    "assistant_model": lambda: dict(assistant_model=tiny_llama(vocab_size=VOCAB)),
    "synced_gpus": lambda: dict(synced_gpus=True),
    "guidance_scale": lambda: dict(guidance_scale=1.5),
    "watermarking_config": lambda: dict(watermarking_config=WatermarkingConfig()),
    "output_attentions": lambda: dict(output_attentions=True, return_dict_in_generate=True),
    "output_hidden_states": lambda: dict(output_hidden_states=True, return_dict_in_generate=True),
    "cache_implementation": lambda: dict(cache_implementation="static"),
    "cache_implementation=offloaded": lambda: dict(cache_implementation="offloaded"),
    "cache|past_key_values": lambda: dict(past_key_values=user_cache()),
    "inputs_embeds": lambda: dict(inputs_embeds=torch.zeros(1, 6, 32)),
    "labels": lambda: dict(labels=PROMPT),
    "position_ids": lambda: dict(position_ids=torch.arange(6)[None] + 1),
    "attention_mask has holes": lambda: dict(attention_mask=torch.tensor([[0, 1, 1, 0, 1, 1]])),
    "attention_mask has right padding": lambda: dict(attention_mask=torch.tensor([[1, 1, 1, 1, 1, 0]])),
    "attention_mask has right padding ": lambda: dict(attention_mask=torch.zeros(1, 6, dtype=torch.long)),
    "attention_mask has shape": lambda: dict(
        attention_mask=torch.ones(1, 7, dtype=torch.long) - torch.eye(1, 7).long()
    ),
    "output_scores=True cannot.*more than one sequence": lambda: dict(
        **left_padded(), return_dict_in_generate=True, output_scores=True
    ),
    "output_logits=True cannot.*more than one sequence": lambda: dict(
        **left_padded(), return_dict_in_generate=True, output_logits=True
    ),
    "positions": lambda: dict(max_new_tokens=300),
    "acceptance='maybe'": lambda: dict(acceptance="maybe"),
    "num_drafted=0": lambda: dict(lookahead=0),
    "No drafter named 'earlyexit'": lambda: dict(drafter="earlyexit"),
    "exit_layer=9": lambda: dict(drafter={"kind": "early_exit", "exit_layer": 9}),
    "drafter is a LlamaForCausalLM": lambda: dict(drafter=tiny_llama()),
    "built for another model": lambda: dict(
        drafter=build_drafter("early_exit", wrap_target(tiny_llama(vocab_size=VOCAB)), exit_layer=1)
    ),
    "position 6: every token has been removed": lambda: dict(suppress_tokens=list(range(VOCAB))),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(REFUSALS))
def test_what_cannot_be_honoured_is_refused_by_name(name):
    with pytest.raises(UserError, match=name.strip()):
        ours(**REFUSALS[name]())


def test_positions_that_only_spell_out_the_mask_are_fine():
    mask = left_padded()["attention_mask"]
    spelled = dict(position_ids=(mask.cumsum(1) - 1).clamp(min=0), attention_mask=mask)
    assert torch.equal(ours(left_padded()["ids"], **spelled), plain(**left_padded()))


def test_inside_another_plain_generate_nothing_of_its_is_taken():
    """A processor of a plain generate that itself calls the bridge: the outer streamer is not the inner one's."""
    outer, inner = Puts(), []

    def nested(ids, scores):
        config = GenerationConfig(max_length=8)
        model()._prepare_special_tokens(config)
        inner.append(selfspec.hf_generate(model(), PROMPT, [], [], config))
        return scores

    plain(max_new_tokens=2, streamer=outer, logits_processor=[nested])
    assert len(outer.events) == 1 + 2 + 1 and inner[0].shape[1] == 8


# ---------------------------------------------------------------- the model is left as it was


def state_of(subject):
    """Everything of a model that a call could change: weights, buffers, configs, and what hangs on its modules."""
    digest = hashlib.sha256()
    for name, tensor in sorted({**subject.state_dict(), **dict(subject.named_buffers())}.items()):
        digest.update(name.encode() + tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    modules = [
        (
            name,
            id(child),
            child.training,
            sorted(child.__dict__),
            len(child._forward_hooks),
            len(child._forward_pre_hooks),
        )
        for name, child in subject.named_modules()
    ]
    config = (subject.config.to_dict(), subject.config._attn_implementation, subject.generation_config.to_dict())
    return digest.hexdigest(), modules, config


class Breaks:
    """Fails at its second use, as a processor, a criterion, a streamer or a drafter."""

    name, max_drafted = "breaks", None

    def __init__(self):
        self.uses = 0

    def __call__(self, input_ids, scores):
        self.uses += 1
        if self.uses > 1:
            raise KeyError("broken on purpose")
        return scores if scores is not None else torch.zeros(len(input_ids), dtype=torch.bool)

    def put(self, value):
        self(value, value)

    def start(self, rows):
        pass

    def prefill(self, rows, row, start, end):
        pass

    def propose(self, rows, num_drafted, sampler):
        self(rows, rows)
        return drafters()["always_right"].propose(rows, num_drafted, sampler)


def test_the_model_is_unmodified_after_calls_and_after_exceptions():
    before = state_of(model())
    expected = ours()
    ours(do_sample=True, seed=1, **left_padded())
    assert state_of(model()) == before
    for broken in (
        lambda: dict(logits_processor=[Breaks()]),
        lambda: dict(stopping_criteria=[Breaks()]),
        lambda: dict(streamer=Breaks()),
        lambda: dict(drafter=Breaks()),
    ):
        with pytest.raises((KeyError, AssertionError)):
            ours(**broken())
        assert state_of(model()) == before
        assert torch.equal(ours(), expected) and torch.equal(plain(), expected)


def test_the_model_is_wrapped_once_and_again_when_it_changed():
    subject = tiny_llama(vocab_size=VOCAB, seed=3)
    options = dict(max_new_tokens=12, eos_token_id=None)

    def check(prompt=PROMPT):
        result = subject.generate(prompt, custom_generate=selfspec.hf_generate, drafter="ngram", **options)
        assert torch.equal(result, subject.generate(prompt, **options))
        return hf_module._WRAPPED[subject].target, result

    first, tokens = check()
    assert check()[0] is first
    with torch.no_grad():
        subject.model.layers[1].mlp.up_proj.weight.mul_(-1)  # in place: the same target sees it
    same, changed = check()
    assert same is first and not torch.equal(changed, tokens)
    subject.to(torch.float64)
    assert check()[0].dtype == torch.float64
    subject.to(torch.float32).resize_token_embeddings(VOCAB + 3)
    assert check()[0].vocab_size == VOCAB + 3
    subject.lm_head = torch.nn.Linear(32, VOCAB + 3, bias=False)
    second = check()[0]
    subject.model.layers[0], subject.model.layers[1] = subject.model.layers[1], subject.model.layers[0]
    for index, layer in enumerate(subject.model.layers):
        layer.self_attn.layer_idx = index
    assert check()[0] is not second


def test_a_model_nobody_else_holds_is_freed():
    subject = tiny_llama(vocab_size=VOCAB, seed=4)
    subject.generate(PROMPT, custom_generate=selfspec.hf_generate, drafter="ngram", max_new_tokens=3)
    alive = weakref.ref(subject)
    del subject
    gc.collect()
    assert alive() is None


def test_a_drafter_built_before_a_conversion_is_refused():
    subject = tiny_llama(vocab_size=VOCAB, seed=4)
    drafter = build_drafter("early_exit", wrap_target(subject), exit_layer=1)
    subject.to(torch.float64)
    with pytest.raises(UserError, match="before the model was converted"):
        subject.generate(PROMPT, custom_generate=selfspec.hf_generate, drafter=drafter)


# ---------------------------------------------------------------- threads


def test_threads_on_one_model_do_not_disturb_each_other():
    """Plain generate, greedy and sampled hf_generate with one shared drafter, and a failing call, all at once."""
    shared = drafters()["first_layer"]
    prompts = [torch.tensor([prompt_ids(length, seed=length, vocab_size=VOCAB)]) for length in (3, 70, 9)]
    jobs = {
        "plain": lambda: [plain(ids).tolist() for ids in prompts],
        "greedy": lambda: [ours(ids, drafter=shared).tolist() for ids in prompts],
        "sampled": lambda: [ours(ids, drafter=shared, do_sample=True, seed=4).tolist() for ids in prompts],
        "batched": lambda: ours(**left_padded(), drafter=shared, logits_processor=[ParityOfPrefix()]).tolist(),
    }
    expected = {name: job() for name, job in jobs.items()}
    assert expected["plain"] == expected["greedy"]
    before = state_of(model())
    barrier, wrong = threading.Barrier(len(jobs) + 1), []

    def repeat(name, job):
        barrier.wait()
        for _ in range(6):
            try:
                if job() != expected[name]:
                    wrong.append(name)
            except Exception as error:
                wrong.append((name, error))

    def fail():
        barrier.wait()
        for _ in range(12):
            with pytest.raises(KeyError):
                ours(logits_processor=[Breaks()])

    threads = [threading.Thread(target=repeat, args=item) for item in jobs.items()] + [threading.Thread(target=fail)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert state_of(model()) == before
