"""Inside transformers' `generate`: the same tokens for every option, the same distribution, refusals by name."""

from __future__ import annotations

import functools

import pytest
import torch
from hf_calls import NEW, PROMPT, VOCAB, ParityOfPrefix, Puts, drafters, free_run, left_padded, model, ours, plain
from scipy.stats import chisquare
from transformers import DynamicCache, GenerationConfig, LogitsProcessor
from transformers.generation import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    WatermarkingConfig,
)

import selfspec
from selfspec import Sampling, UserError, build_drafter, wrap_target
from tiny_models import tiny_llama, tiny_mistral


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
    "max_time": lambda: dict(max_time=1e-9),
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
    "use_mtp": lambda: dict(use_mtp=True),
    "is_assistant": lambda: dict(is_assistant=True),
    "num_beam_groups": lambda: dict(num_beam_groups=2),
    "diversity_penalty": lambda: dict(diversity_penalty=0.5),
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
    "seed=1.5": lambda: dict(seed=1.5),
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
    if "offloaded" in name and torch.version.cuda and not torch.cuda.is_available():
        pytest.skip("transformers asks a CUDA build for a stream before it asks us")
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
