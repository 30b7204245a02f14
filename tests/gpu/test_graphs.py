"""Rounds as CUDA graphs, on a GPU: `pytest -m gpu tests/gpu`. What needs no GPU is in test_recorded_rounds.py."""

from __future__ import annotations

import pytest
import torch
from cases import (
    CACHES,
    DRAFTERS,
    PAIRS,
    RAGGED,
    RULES,
    addresses,
    drafters_for,
    placed,
    sampler_of,
    target_on,
    the_rounds,
    told,
)

from selfspec import Decoder, Sampling
from selfspec.decoding import graphs
from selfspec.decoding.drafting import Drafting
from selfspec.decoding.round import decode_round
from selfspec.decoding.stopwatch import Stopwatch
from selfspec.lookahead import Plan
from tiny_models import prompt_ids

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def target():
    return target_on("cuda")


@pytest.fixture(scope="module")
def drafters(target):
    return drafters_for(target)


@pytest.mark.parametrize(("drafter", "rule"), PAIRS)
def test_tokens_are_equal_however_rounds_are_run(target, drafters, drafter, rule):
    options = dict(max_new_tokens=40, lookahead=3, eos_token_ids=[5, 44], seed=11, **RULES[rule])
    eager, split, whole, auto = (
        told(Decoder(target, drafters[drafter], 3, rounds=mode).decode(RAGGED, **options))
        for mode in ("eager", "split", "whole", "auto")
    )
    assert split == eager
    assert whole == eager
    assert auto == eager


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_tokens_are_those_of_generate(target, drafters, drafter):
    expected = [target.hf_generate(ids, 48, Sampling()).token_ids for ids in RAGGED[:3]]
    outputs = Decoder(target, drafters[drafter], 2, rounds="whole").decode(
        RAGGED[:3], max_new_tokens=48, ignore_eos=True
    )
    assert [o.token_ids for o in outputs] == expected


@pytest.mark.parametrize("cache", sorted(CACHES))
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_long_rows_pass_from_one_extent_to_the_next(target, drafters, cache, drafter, monkeypatch):
    monkeypatch.setattr(graphs, "EXTENT_BUCKET", 64)
    prompts = [prompt_ids(50, seed=1), prompt_ids(3, seed=2), prompt_ids(120, seed=3)]
    options = dict(max_new_tokens=200, lookahead=5, ignore_eos=True)
    eager = told(Decoder(target, drafters[drafter], 2, cache=CACHES[cache], rounds="eager").decode(prompts, **options))
    decoder = Decoder(target, drafters[drafter], 2, cache=CACHES[cache], rounds="whole")
    assert told(decoder.decode(prompts, **options)) == eager
    assert the_rounds(decoder).num_captures >= 4


@pytest.fixture
def no_waiting():
    """Inside `with no_waiting():` whatever makes the host wait for the device raises."""

    class Forbidden:
        def __enter__(self):
            torch.cuda.set_sync_debug_mode("error")

        def __exit__(self, *args):
            torch.cuda.set_sync_debug_mode("default")

    yield Forbidden
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("drafter", "rule"), PAIRS)
@torch.inference_mode()
def test_no_round_waits_for_the_device(target, drafters, drafter, rule, no_waiting):
    drafter, sampler = drafters[drafter], sampler_of(rule, target)
    rows, stopwatch = placed(target, drafter), Stopwatch(target.device, wait=False)
    num_drafted = 0 if drafter.max_drafted == 0 else 3
    stopwatch.start()
    decode_round(target, drafter, rows, Drafting(rows, Plan(num_drafted), sampler), sampler, stopwatch)
    with no_waiting():
        decode_round(target, drafter, rows, Drafting(rows, Plan(num_drafted), sampler), sampler, stopwatch)


def test_the_check_notices_waiting(no_waiting):
    """Negative control."""
    x = torch.ones(3, device="cuda")
    with no_waiting(), pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        x.sum().item()


@pytest.mark.parametrize("drafter", ["none", "early_exit", "independent", "ngram"])
@pytest.mark.parametrize("cache", sorted(CACHES))
def test_the_loop_waits_for_nothing_but_the_last_report(target, drafters, drafter, cache, no_waiting):
    """Admission, refilling and release included; the first call captures what the second replays."""
    decoder = Decoder(target, drafters[drafter], 2, cache=CACHES[cache], rounds="whole")
    options = dict(max_new_tokens=60, lookahead=3, ignore_eos=True)
    first = told(decoder.decode(RAGGED, **options))
    captures, kept = the_rounds(decoder).num_captures, addresses(decoder.rows)
    with no_waiting():
        assert told(decoder.decode(RAGGED, **options)) == first
    assert the_rounds(decoder).num_captures == captures
    assert addresses(decoder.rows) == kept


def test_a_new_seed_needs_no_new_capture(target, drafters):
    options = dict(max_new_tokens=30, lookahead=3, ignore_eos=True, sampling=Sampling(temperature=1.0))
    recorded, texts = Decoder(target, drafters["early_exit"], rounds="whole"), set()
    for seed in (0, 1, 2**63 + 5, -1):
        outputs = recorded.decode([RAGGED[0]], seed=seed, **options)
        eager = Decoder(target, drafters["early_exit"], rounds="eager").decode([RAGGED[0]], seed=seed, **options)
        assert told(outputs) == told(eager)
        texts.add(tuple(outputs[0].token_ids))
    assert len(texts) == 4 and the_rounds(recorded).num_captures == 1


def test_what_is_baked_in_is_part_of_the_key(target, drafters):
    decoder = Decoder(target, drafters["early_exit"], 2, capacity=200, rounds="whole")
    for options in (
        dict(),
        dict(sampling=Sampling(temperature=0.5)),
        dict(sampling=Sampling(temperature=1.5), acceptance="coupled"),
        dict(sampling=Sampling(suppress_tokens=(3, 4))),
        dict(lookahead=6),
        dict(eos_token_ids=[60, 61, 62]),
        dict(),
    ):
        options = dict(max_new_tokens=25, lookahead=2, seed=4) | options
        fresh = Decoder(target, drafters["early_exit"], 2, rounds="eager").decode(RAGGED, **options)
        assert told(decoder.decode(RAGGED, **options)) == told(fresh)


@pytest.mark.parametrize("drafter", ["none", "early_exit", "synthetic"])
def test_ends_of_every_kind_read_a_round_late(drafter):
    class Letters:
        def decode(self, ids, skip_special_tokens=True):
            return "".join(chr(97 + i % 26) for i in ids)

        def get_vocab(self):
            return {}

    target = target_on("cuda")
    target.tokenizer = Letters()
    drafter = drafters_for(target)[drafter]
    free = Decoder(target, None).decode([RAGGED[0]], max_new_tokens=40, ignore_eos=True)[0]
    end, text = free.token_ids[17], target.tokenizer.decode(free.token_ids)
    for options, reason in (
        (dict(eos_token_ids=end), "eos"),
        (dict(ignore_eos=True), "length"),
        (dict(ignore_eos=True, stop_strings=[text[20:23]]), "stop_string"),
    ):
        eager, whole = (
            Decoder(target, drafter, 2, rounds=mode).decode(RAGGED, max_new_tokens=40, lookahead=4, **options)
            for mode in ("eager", "whole")
        )
        assert told(whole) == told(eager) and whole[0].finish_reason == reason
        assert [o.text for o in whole] == [o.text for o in eager]
