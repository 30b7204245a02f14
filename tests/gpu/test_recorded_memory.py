"""The memory of rounds as graphs, on the CPU: what a graph holds, what is left of a round, what is given back."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from cases import (
    PAIRS,
    RAGGED,
    addresses,
    drafters_for,
    placed,
    sampler_of,
    target_on,
    the_rounds,
    told,
)
from op_tape import TapeRecorder
from torch.utils._python_dispatch import TorchDispatchMode

from selfspec import Decoder, Sampling
from selfspec.decoding import graphs
from selfspec.decoding.capture import NotCapturable, tensors_in
from selfspec.decoding.drafting import Drafting
from selfspec.decoding.round import decode_round
from selfspec.decoding.stopwatch import Stopwatch
from selfspec.lookahead import Plan

TARGET = target_on("cpu")
ALL = drafters_for(TARGET)


class Made(TorchDispatchMode):
    """Every tensor an operator returned, weakly."""

    def __init__(self):
        super().__init__()
        self.references = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {id(tensor) for tensor in tensors_in((args, tuple((kwargs or {}).values())))}
        self.references += [(str(func), weakref.ref(t)) for t in tensors_in(out) if id(t) not in given]
        return out

    def alive(self):
        return [name for name, reference in self.references if reference() is not None]


@pytest.mark.parametrize(("drafter", "rule"), PAIRS)
@torch.inference_mode()
def test_a_graph_holds_the_memory_it_reads_and_nothing_else_is_left_of_a_round(drafter, rule, tapes):
    """No memo is written by the third run, and all that it uses was there, and is held since, the second."""
    rows, recorder = placed(TARGET, ALL[drafter]), TapeRecorder("cpu")
    rounds = graphs.GraphedRounds(ALL[drafter], rows, sampler_of(rule, TARGET), whole=True, recorder=recorder)
    num_drafted = 0 if drafter == "none" else 3
    kept = addresses(rows)
    rounds(Plan(num_drafted), Stopwatch(TARGET.device))()
    (recording,) = recorder.recordings
    held = {storage.data_ptr() for storage in recording.inputs}
    assert recording.graphs[0].external() <= held
    assert addresses(rows) == kept

    (_, extent), *_ = rounds._captured
    with rows.reading(extent), Made() as made:
        drafting = Drafting(rows, Plan(num_drafted), rounds.sampler)
        report = decode_round(TARGET, ALL[drafter], rows, drafting, rounds.sampler, Stopwatch(TARGET.device))
    del report, drafting
    gc.collect()
    assert not made.alive()


@pytest.mark.parametrize(
    "touch",
    [
        lambda x: x.tolist(),
        lambda x: int(x[0]),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.tensor([1, 2]),
        lambda x: x.__setitem__(0, 5),
    ],
)
@torch.inference_mode()
def test_the_tape_refuses_what_no_graph_can_hold(touch):
    """Negative control."""
    with pytest.raises(NotCapturable):
        TapeRecorder("cpu").record([lambda: touch(torch.arange(5) + 1)])


@torch.inference_mode()
def test_the_tape_replays_what_happened_and_not_what_python_would_do():
    """Negative control: a number is baked in, memory is read anew."""
    x, factor, out = torch.ones(3), [2.0], []

    def part():
        out[:] = [x * factor[0]]
        out[0][:2] = 7.0

    recording = TapeRecorder("cpu").record([part])
    factor[0] = 100.0
    x.fill_(5.0)
    recording.graphs[0].replay()
    assert out[0].tolist() == [7.0, 7.0, 10.0]


@torch.inference_mode()
def test_the_check_for_leftovers_notices_a_memo():
    """Negative control."""
    memo = {}
    with Made() as made:
        memo["table"] = torch.arange(4) * 2
    assert made.alive() == ["aten.mul.Tensor"]


def test_a_table_made_anew_for_a_longer_cache_does_not_reach_older_graphs(tapes):
    """Two decoders share a target, and with it the rotary table, which grows with the longer cache."""
    target = target_on("cpu")
    options = dict(max_new_tokens=15, ignore_eos=True)
    short = Decoder(target, None, rounds="whole")
    expected = told(short.decode([RAGGED[0]], **options))
    old = [table for tables in target._rotary_tables.values() for table in tables]
    Decoder(target, None, capacity=600, rounds="whole").decode([RAGGED[0]], **options)
    assert all(old[0] is not table for tables in target._rotary_tables.values() for table in tables)
    held = {s.data_ptr() for c in the_rounds(short)._captured.values() for s in c.recording.inputs}
    assert {table.untyped_storage().data_ptr() for table in old} <= held
    assert told(short.decode([RAGGED[0]], **options)) == expected


def test_graphs_do_not_keep_rows_alive(tapes):
    decoder = Decoder(TARGET, ALL["early_exit"], rounds="whole")
    decoder.decode([RAGGED[0]], max_new_tokens=8)
    gc.disable()  # a cache must go when a longer one is needed, not when Python finds the time
    try:
        rows = weakref.ref(decoder.rows)
        decoder.rows = None
        assert rows() is None
    finally:
        gc.enable()


def test_the_number_of_graphs_is_bounded(tapes, monkeypatch):
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 3)
    monkeypatch.setattr(graphs, "MAX_SETTINGS", 2)
    decoder = Decoder(TARGET, ALL["ngram"], capacity=200, rounds="whole")
    for temperature in (0.0, 0.5, 0.6, 0.7):
        for lookahead in (1, 2, 3, 4, 5):
            options = dict(sampling=Sampling(temperature=temperature), lookahead=lookahead, ignore_eos=True)
            outputs = decoder.decode([RAGGED[0]], max_new_tokens=8, **options)
            eager = Decoder(TARGET, ALL["ngram"], rounds="eager").decode([RAGGED[0]], max_new_tokens=8, **options)
            assert told(outputs) == told(eager)
    assert len(decoder.rows.rounds) == 2
    assert all(len(rounds._captured) == 3 for rounds in decoder.rows.rounds.values())
