"""What may go wrong around CUDA graphs, on a GPU: exceptions, broken captures, memory that moves, other streams."""

from __future__ import annotations

import gc

import pytest
import torch
from cases import (
    RAGGED,
    RaisesAt,
    ReadsTheHost,
    drafters_for,
    placed,
    sampler_of,
    state_of,
    target_on,
    the_rounds,
    told,
)

from selfspec import Decoder
from selfspec.decoding import graphs
from selfspec.decoding.capture import NotCapturable
from selfspec.decoding.stopwatch import Stopwatch
from selfspec.lookahead import Plan

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def target():
    return target_on("cuda")


@pytest.fixture(scope="module")
def drafters(target):
    return drafters_for(target)


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
        rounds(Plan(3), Stopwatch(target.device))
    assert state_of(rows) == before
    rounds(Plan(3), Stopwatch(target.device))()
    assert rows.lengths_B.tolist() > before[0]


class BreaksTheCapture:
    """Waits for the device only once a capture has begun, so that no rehearsal finds out: CUDA breaks it off."""

    name = "breaks_the_capture"
    max_drafted = None

    def __init__(self, drafter):
        self.drafter, self.broken = drafter, True
        self.start, self.prefill = drafter.start, drafter.prefill

    def propose(self, rows, drafting):
        if self.broken and torch.cuda.is_current_stream_capturing():
            rows.lengths_B.tolist()
        return self.drafter.propose(rows, drafting)


def test_a_capture_that_cuda_breaks_off_leaves_the_engine_usable(target, drafters):
    drafter, stream = BreaksTheCapture(drafters["early_exit"]), torch.cuda.current_stream()
    decoder = Decoder(target, drafter, 2, rounds="whole")
    options = dict(max_new_tokens=12, lookahead=3, ignore_eos=True)
    expected = told(Decoder(target, drafters["early_exit"], 2, rounds="eager").decode(RAGGED, **options))
    with pytest.raises(NotCapturable):
        decoder.decode(RAGGED, **options)
    assert torch.cuda.current_stream() == stream
    torch.cuda.empty_cache()
    assert torch.rand(3, device="cuda").isfinite().all(), "the random generator does not believe in a capture any more"
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
