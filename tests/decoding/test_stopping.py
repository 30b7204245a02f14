"""Where output ends: EOS, stop strings and length, at every offset inside an accepted run; ids and text trimmed
alike.
"""

from __future__ import annotations

import functools

import pytest
import torch

from selfspec import Decoder, UserError, build_drafter, decode, wrap_target
from selfspec.target.byte_tokenizer import byte_tokenizer
from tiny_models import prompt_ids, tiny_llama

PROMPT = prompt_ids(6)
K = 4


@functools.cache
def target():
    """A byte-level model whose greedy text is varied."""
    return wrap_target(tiny_llama(vocab_size=256, seed=1), byte_tokenizer(), "bytes")


@functools.cache
def drafters():
    """One that is always right (so that every round accepts all K) and one that is sometimes right."""
    return {
        "always": build_drafter("independent", target(), model=target()),
        "sometimes": build_drafter("early_exit", target(), exit_layer=3),
        "none": None,
    }


@functools.cache
def free_run(count=40):
    return decode(target(), None, [PROMPT], max_new_tokens=count, ignore_eos=True)[0].token_ids


@pytest.mark.parametrize("drafter", ["always", "sometimes", "none"])
def test_max_new_tokens_is_met_exactly(drafter):
    for count in (1, 2, K - 1, K, K + 1, K + 2, 2 * K + 1, 2 * K + 3):
        output = decode(target(), drafters()[drafter], [PROMPT], max_new_tokens=count, lookahead=K, ignore_eos=True)[0]
        assert output.token_ids == free_run()[:count]
        assert output.finish_reason == "length"
        assert output.text == target().tokenizer.decode(output.token_ids)


@pytest.mark.parametrize("drafter", ["always", "sometimes", "none"])
def test_eos_is_the_last_token_at_every_offset_inside_an_accepted_run(drafter):
    free = free_run()
    for offset in range(2 * (K + 1) + 1):
        eos = free[offset]
        first = free.index(eos)
        options = dict(max_new_tokens=40, lookahead=K, eos_token_ids=[255, eos, 254])
        output = decode(target(), drafters()[drafter], [PROMPT], **options)[0]
        assert output.token_ids == free[: first + 1]
        assert output.finish_reason == "eos"
        ignored = decode(target(), drafters()[drafter], [PROMPT], **options, ignore_eos=True)[0]
        assert ignored.token_ids == free and ignored.finish_reason == "length"


def test_the_earliest_of_several_eos_ids_counts_whatever_their_order():
    free = free_run()
    late, early = free[7], free[3]
    for ids in ([late, early], [early, late]):
        output = decode(target(), drafters()["always"], [PROMPT], lookahead=K, eos_token_ids=ids)[0]
        assert output.token_ids == free[: min(free.index(late), free.index(early)) + 1]


def test_eos_on_the_last_allowed_token_is_eos():
    free = free_run()
    offset = next(i for i, token in enumerate(free) if i > 2 and token not in free[:i])
    output = decode(target(), None, [PROMPT], max_new_tokens=offset + 1, eos_token_ids=free[offset])[0]
    assert output.finish_reason == "eos" and len(output.token_ids) == offset + 1


@pytest.mark.parametrize("drafter", ["always", "sometimes", "none"])
def test_stop_strings_cut_where_transformers_cuts_at_every_offset(drafter):
    """Stop strings of one to three characters taken from the text itself, so they straddle tokens and accepted runs."""
    text = target().tokenizer.decode(free_run())
    tried = 0
    for start in range(len(text) - 3):
        stops = [text[start : start + 1 + start % 3], "never in the text"]
        if "�" in stops[0]:
            continue
        tried += 1
        expected = (
            target()
            .hf_model.generate(
                torch.tensor([PROMPT]),
                max_new_tokens=40,
                do_sample=False,
                eos_token_id=None,
                stop_strings=stops,
                tokenizer=target().tokenizer,
            )[0, len(PROMPT) :]
            .tolist()
        )
        output = decode(
            target(), drafters()[drafter], [PROMPT], max_new_tokens=40, lookahead=K, ignore_eos=True, stop_strings=stops
        )[0]
        assert output.token_ids == expected, stops
        assert output.finish_reason == "stop_string"
        assert output.text == text[: text.find(stops[0])]
    assert tried > 5


def test_a_second_and_a_longer_prompt_on_the_same_decoder_equal_fresh_ones():
    decoder = Decoder(target(), drafters()["sometimes"])
    for length in (6, 3, 90, 6):
        prompt = prompt_ids(length, seed=length)
        fresh = decode(target(), None, [prompt], max_new_tokens=20, ignore_eos=True)[0]
        assert decoder.decode([prompt], max_new_tokens=20, lookahead=K, ignore_eos=True)[0].token_ids == fresh.token_ids


@pytest.mark.parametrize("drafter", ["always", "sometimes", "none"])
def test_a_further_turn_on_the_kept_cache_processes_only_the_new_tokens(drafter):
    decoder = Decoder(target(), drafters()[drafter], capacity=200)
    conversation, held = list(PROMPT), 0
    for turn in range(4):
        output = decoder.decode([conversation], max_new_tokens=11 + turn, lookahead=K, ignore_eos=True, reuse=True)[0]
        fresh = decode(target(), None, [conversation], max_new_tokens=11 + turn, ignore_eos=True)[0]
        assert output.token_ids == fresh.token_ids
        if turn:  # all that was committed, except the token that was still pending
            assert output.num_reused_tokens == held
        held = len(conversation) + len(output.token_ids) - 1
        conversation += output.token_ids + prompt_ids(5, seed=turn)
    edited = [*conversation[:8], 9, *conversation[9:]]
    output = decoder.decode([edited], max_new_tokens=11, lookahead=K, ignore_eos=True, reuse=True)[0]
    assert output.num_reused_tokens == 8
    assert output.token_ids == decode(target(), None, [edited], max_new_tokens=11, ignore_eos=True)[0].token_ids
    again = decoder.decode([edited], max_new_tokens=11, lookahead=K, ignore_eos=True)[0]
    assert again.num_reused_tokens == 0, "measurements never reuse unless asked"


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(max_new_tokens=0), "max_new_tokens=0"),
        (dict(max_new_tokens=True), "max_new_tokens=True"),
        (dict(max_new_tokens=251), r"need 257 positions; bytes has 256.*up to 250"),
        (dict(lookahead=0), "num_drafted=0"),
        (dict(lookahead=2.5), "lookahead=2.5"),
        (dict(lookahead="fixd"), "No lookahead named 'fixd'.*fixed"),
        (dict(max_batch_rows=0), "max_batch_rows=0"),
        (dict(acceptance="maybe"), "acceptance='maybe'"),
        (dict(eos_token_ids=[256]), "allowed are token ids 0 to 255"),
        (dict(stop_strings=[""]), "non-empty"),
        (dict(seed=1.5), "seed=1.5"),
        (dict(seed=None), "seed=None"),
        (dict(lookahead=None), "lookahead=None"),
        (dict(lookahead=[3]), r"lookahead=\[3\]"),
        (dict(sampling={"temperature": 1}), "Sampling"),
        (dict(eos_token_ids=2.0), "2.0"),
        (dict(processors=len), r"Write \[processor\]"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(options, message):
    with pytest.raises(UserError, match=message):
        decode(target(), drafters()["sometimes"], [PROMPT], **options)


@pytest.mark.parametrize("drafter, message", [("early_exit", "is not a drafter"), (7, "is not a drafter")])
def test_what_is_no_drafter_is_refused(drafter, message):
    with pytest.raises(UserError, match=message):
        decode(target(), drafter, [PROMPT])


def test_a_drafter_built_for_another_target_is_refused_instead_of_writing_wrong_tokens():
    other = wrap_target(tiny_llama(vocab_size=256, seed=2), byte_tokenizer(), "other")
    for drafter in (
        build_drafter("early_exit", other, exit_layer=2),
        build_drafter("independent", other, model=other),
    ):
        with pytest.raises(UserError, match=r"built for the target other, not for this one \(bytes\)"):
            decode(target(), drafter, [PROMPT])


@pytest.mark.parametrize(
    "prompts, message",
    [
        ([[]], "is empty"),
        ([""], "is empty"),
        ([[5, 256]], "Token id 256"),
        ([[5, -1]], "Token id -1"),
        ([[5, 1.5]], "holds 1.5"),
        ("text", r"Write \[text\]"),
        ([7], "list of token ids or a chat"),
        ([[{"role": "user", "content": "hi"}]], "no chat template"),
        ([[{"role": "user"}]], "'role' and 'content'"),
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(prompts, message):
    with pytest.raises(UserError, match=message):
        decode(target(), None, prompts)


def test_broken_weights_are_reported_with_their_position_and_leave_model_and_decoder_usable():
    model = tiny_llama(vocab_size=256, seed=1)
    broken = wrap_target(model, byte_tokenizer())
    decoder = Decoder(broken, build_drafter("early_exit", broken, exit_layer=2))
    good = decoder.decode([PROMPT], max_new_tokens=9, ignore_eos=True)[0].token_ids
    weight = model.model.norm.weight
    with torch.no_grad():
        kept = weight.clone()
        weight.fill_(float("nan"))
    with pytest.raises(UserError, match=r"position 6: the target's logits hold NaN"):
        decoder.decode([PROMPT], max_new_tokens=9, ignore_eos=True)
    with torch.no_grad():
        weight.copy_(kept)
    assert decoder.decode([PROMPT], max_new_tokens=9, ignore_eos=True)[0].token_ids == good
