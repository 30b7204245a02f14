"""Rounds as CUDA graphs, on a GPU: `pytest -m gpu tests/gpu`. What needs no GPU is in test_recorded_rounds.py."""

from __future__ import annotations

import gc

import pytest
import torch
from cases import (
    CACHES,
    DRAFTERS,
    PAIRS,
    RAGGED,
    RULES,
    RaisesAt,
    ReadsTheHost,
    addresses,
    drafters_for,
    state_of,
    target_on,
    told,
)

from selfspec import Decoder, Sampling
from selfspec.decoding import graphs
from selfspec.decoding.capture import NotCapturable
from selfspec.decoding.round import decode_round, prefill
from selfspec.decoding.rows import Rows
from selfspec.decoding.sampler import Sampler
from selfspec.decoding.stopwatch import Stopwatch
from selfspec.sampling import build_rule, build_transforms
from tiny_models import prompt_ids

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def target():
    return target_on("cuda")


@pytest.fixture(scope="module")
def drafters(target):
    return drafters_for(target)


def the_rounds(decoder):
    (rounds,) = decoder.rows.rounds.values()
    return rounds


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


def sampler_of(rule, target, seed=3):
    sampling = RULES[rule].get("sampling", Sampling())
    acceptance = build_rule(RULES[rule].get("acceptance", "auto"), sampling)
    return Sampler(build_transforms(sampling, None, target.vocab_size), acceptance, seed)


def placed(target, drafter, rows=2, capacity=300):
    state = Rows(target, rows, capacity)
    state.set_eos([96])
    drafter.start(state)
    for row in range(rows):
        ids = prompt_ids(9 + row, seed=row)
        if hasattr(drafter, "learn"):
            drafter.learn([prompt_ids(9 + row, seed=row) + list(range(20)) for row in range(rows)])
        state.place(row, ids, 200, row)
        prefill(target, drafter, state, row, 0, len(ids) - 1)
    return state


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
    decode_round(target, drafter, rows, num_drafted, sampler, stopwatch)
    with no_waiting():
        decode_round(target, drafter, rows, num_drafted, sampler, stopwatch)


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


@pytest.mark.parametrize("mode", ["split", "whole"])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_an_exception_while_capturing_leaves_the_engine_usable(target, drafters, call, mode):
    drafter = RaisesAt(drafters["early_exit"], call)
    decoder, stream = Decoder(target, drafter, 2, rounds=mode), torch.cuda.current_stream()
    options = dict(max_new_tokens=12, lookahead=3, ignore_eos=True)
    with pytest.raises(ZeroDivisionError):
        decoder.decode(RAGGED, **options)
    assert torch.cuda.current_stream() == stream
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.empty_cache()  # refused while the allocator believes in a capture
    drafter.call = 0
    expected = told(Decoder(target, drafters["early_exit"], 2, rounds="eager").decode(RAGGED, **options))
    assert told(decoder.decode(RAGGED, **options)) == expected


@torch.inference_mode()
def test_an_exception_while_capturing_leaves_the_rows_as_they_were(target, drafters):
    rows = placed(target, drafter := RaisesAt(drafters["early_exit"], 3))
    before = state_of(rows)
    rounds = graphs.choose_rounds(drafter, rows, sampler_of("greedy", target), "whole")
    with pytest.raises(ZeroDivisionError):
        rounds(3, Stopwatch(target.device))
    assert state_of(rows) == before
    rounds(3, Stopwatch(target.device))()
    assert rows.lengths_B.tolist() > before[0]


class BreaksTheCapture:
    """Waits for the device only once a capture has begun, so that no rehearsal finds out: CUDA breaks it off."""

    name = "breaks_the_capture"
    max_drafted = None

    def __init__(self, drafter):
        self.drafter, self.broken = drafter, True
        self.start, self.prefill = drafter.start, drafter.prefill

    def propose(self, rows, num_drafted, sampler):
        if self.broken and torch.cuda.is_current_stream_capturing():
            rows.lengths_B.tolist()
        return self.drafter.propose(rows, num_drafted, sampler)


def test_a_capture_that_cuda_breaks_off_leaves_the_engine_usable(target, drafters):
    drafter, stream = BreaksTheCapture(drafters["early_exit"]), torch.cuda.current_stream()
    decoder = Decoder(target, drafter, 2, rounds="whole")
    options = dict(max_new_tokens=12, lookahead=3, ignore_eos=True)
    expected = told(Decoder(target, drafters["early_exit"], 2, rounds="eager").decode(RAGGED, **options))
    with pytest.raises(NotCapturable):
        decoder.decode(RAGGED, **options)
    assert torch.cuda.current_stream() == stream
    torch.cuda.empty_cache()
    with pytest.warns(UserWarning, match="launched from Python"):
        auto = Decoder(target, drafter, 2, rounds="auto").decode(RAGGED, **options)
    assert told(auto) == expected
    drafter.broken = False
    assert told(decoder.decode(RAGGED, **options)) == expected
    assert the_rounds(decoder).num_captures >= 1


def test_a_drafter_that_reads_the_host_is_run_from_python_with_a_warning(target, drafters):
    drafter = ReadsTheHost(drafters["early_exit"])
    options = dict(max_new_tokens=100, lookahead=3, ignore_eos=True)
    with pytest.warns(UserWarning, match="reads_the_host: rounds are launched from Python"):
        outputs = Decoder(target, drafter, 2, rounds="auto").decode(RAGGED, **options)
    assert told(outputs) == told(Decoder(target, drafters["early_exit"], 2, rounds="eager").decode(RAGGED, **options))
    with pytest.raises(NotCapturable):
        Decoder(target, drafter, 2, rounds="whole").decode(RAGGED, **options)


def test_a_table_made_anew_for_a_longer_cache_does_not_reach_older_graphs():
    target = target_on("cuda")
    options = dict(max_new_tokens=15, ignore_eos=True)
    short = Decoder(target, None, rounds="whole")
    expected = told(short.decode([RAGGED[0]], **options))
    Decoder(target, None, capacity=600, rounds="whole").decode([RAGGED[0]], **options)
    scribble = [torch.full((1 << size,), 7.0, device="cuda") for size in range(6, 20) for _ in range(4)]
    assert told(short.decode([RAGGED[0]], **options)) == expected
    del scribble


def test_decoding_follows_the_callers_stream(target, drafters):
    decoder = Decoder(target, drafters["early_exit"], 2, rounds="whole")
    options = dict(max_new_tokens=30, lookahead=3, ignore_eos=True)
    expected = told(decoder.decode(RAGGED, **options))
    own = torch.cuda.Stream()
    own.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(own):
        assert told(decoder.decode(RAGGED, **options)) == expected
        assert torch.cuda.current_stream() == own
    torch.cuda.current_stream().wait_stream(own)


@pytest.mark.parametrize("mode", ["eager", "split", "whole"])
def test_a_gpu_that_is_not_the_current_one(mode):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    target = target_on("cuda:1")
    options = dict(max_new_tokens=30, lookahead=3, ignore_eos=True)
    expected = told(Decoder(target_on("cuda:0"), None).decode(RAGGED, **options))
    drafter = drafters_for(target)["early_exit"]
    tokens = [ids for ids, *_ in told(Decoder(target, drafter, 2, rounds=mode).decode(RAGGED, **options))]
    assert tokens == [ids for ids, *_ in expected]
    assert torch.cuda.current_device() == 0


def test_a_dropped_decoder_gives_its_memory_back(target, drafters):
    def one(capacity):
        decoder = Decoder(target, drafters["early_exit"], 4, capacity=capacity, rounds="whole")
        decoder.decode(RAGGED, max_new_tokens=20, ignore_eos=True)
        return decoder

    one(200)  # workspaces and tables of the target, which stay
    torch.cuda.empty_cache()
    gc.collect()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(3):
        decoder = one(900)
        assert torch.cuda.memory_allocated() - before >= decoder.rows.cache.kv_bytes
        del decoder
        assert torch.cuda.memory_allocated() - before < 1 << 20
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - reserved < 64 << 20
