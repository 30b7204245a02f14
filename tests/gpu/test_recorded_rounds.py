"""Rounds as graphs, on the CPU: recorded operators instead of CUDA graphs, everything else as it runs on a GPU."""

from __future__ import annotations

import gc
import warnings
import weakref

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
from op_tape import TapeRecorder
from torch.utils._python_dispatch import TorchDispatchMode

from selfspec import Decoder, Sampling, UserError
from selfspec.decoding import graphs
from selfspec.decoding.capture import NotCapturable, tensors_in
from selfspec.decoding.round import decode_round, prefill
from selfspec.decoding.rows import Rows
from selfspec.decoding.sampler import Sampler
from selfspec.decoding.stopwatch import Stopwatch
from selfspec.sampling import build_rule, build_transforms
from tiny_models import prompt_ids

TARGET = target_on("cpu")
ALL = drafters_for(TARGET)


def the_rounds(decoder):
    (rounds,) = decoder.rows.rounds.values()
    return rounds


def sampler_of(rule="greedy", seed=3):
    options = RULES[rule]
    sampling = options.get("sampling", Sampling())
    rule = build_rule(options.get("acceptance", "auto"), sampling)
    return Sampler(build_transforms(sampling, None, TARGET.vocab_size), rule, seed)


@pytest.mark.parametrize(("drafter", "rule"), PAIRS)
def test_recorded_rounds_commit_the_tokens_of_eager_ones(drafter, rule, tapes):
    options = dict(max_new_tokens=20, lookahead=3, eos_token_ids=[5, 44], seed=11, **RULES[rule])
    eager, split, whole = (
        told(Decoder(TARGET, ALL[drafter], 3, rounds=mode).decode(RAGGED, **options))
        for mode in ("eager", "split", "whole")
    )
    assert split == eager
    assert whole == eager
    assert tapes and all(recorder.recordings for recorder in tapes)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("cache", sorted(CACHES))
def test_long_rows_pass_from_one_extent_to_the_next(cache, drafter, tapes, monkeypatch):
    monkeypatch.setattr(graphs, "EXTENT_BUCKET", 64)
    prompts = [prompt_ids(50, seed=1), prompt_ids(3, seed=2), prompt_ids(120, seed=3)]
    options = dict(max_new_tokens=100, lookahead=5, ignore_eos=True)
    outputs = {}
    for mode in ("eager", "whole"):
        decoder = Decoder(TARGET, ALL[drafter], 2, cache=CACHES[cache], rounds=mode)
        outputs[mode] = told(decoder.decode(prompts, **options))
    assert outputs["whole"] == outputs["eager"]
    assert the_rounds(decoder).num_captures >= 3


def test_a_changing_draft_length_never_hides_the_last_tokens(tapes, monkeypatch):
    """With results a round late, a long round not yet read counts although the next one is short."""
    monkeypatch.setattr(graphs, "EXTENT_BUCKET", 1)

    class Alternating:
        max_drafted = 12

        def __init__(self):
            self.calls = 0

        def choose(self):
            self.calls += 1
            return 12 if self.calls % 2 else 1

    drafter = ALL["synthetic"].__class__(TARGET, 1.0)
    options = dict(max_new_tokens=90, ignore_eos=True)
    expected = Decoder(TARGET, None, 1).decode([RAGGED[0]], **options)
    got = Decoder(TARGET, drafter, 1, rounds="whole").decode([RAGGED[0]], lookahead=Alternating(), **options)
    assert got[0].token_ids == expected[0].token_ids
    assert max(r.num_accepted for r in got[0].rounds) == 12


def test_a_new_seed_needs_no_new_capture(tapes):
    options = dict(max_new_tokens=12, lookahead=3, ignore_eos=True, sampling=Sampling(temperature=1.0))
    recorded = Decoder(TARGET, ALL["early_exit"], rounds="whole")
    texts = set()
    for seed in (0, 1, 2**63 + 5, -1):
        outputs = recorded.decode([RAGGED[0]], seed=seed, **options)
        eager = Decoder(TARGET, ALL["early_exit"], rounds="eager").decode([RAGGED[0]], seed=seed, **options)
        assert told(outputs) == told(eager)
        texts.add(tuple(outputs[0].token_ids))
    assert len(texts) == 4 and the_rounds(recorded).num_captures == 1


def test_what_is_baked_in_is_part_of_the_key(tapes):
    """The same decoder with another temperature, rule, K or set of ends: each as if it had never done anything else."""
    decoder = Decoder(TARGET, ALL["early_exit"], 2, capacity=200, rounds="whole")
    for options in (
        dict(),
        dict(sampling=Sampling(temperature=0.5)),
        dict(sampling=Sampling(temperature=1.5)),
        dict(sampling=Sampling(temperature=1.5), acceptance="coupled"),
        dict(sampling=Sampling(suppress_tokens=(3, 4))),
        dict(lookahead=6),
        dict(eos_token_ids=[]),
        dict(eos_token_ids=[60, 61, 62]),
        dict(),
    ):
        options = dict(max_new_tokens=25, lookahead=2, seed=4) | options
        fresh = Decoder(TARGET, ALL["early_exit"], 2, rounds="eager").decode(RAGGED, **options)
        assert told(decoder.decode(RAGGED, **options)) == told(fresh)


def test_ends_of_every_kind_read_a_round_late(tapes):
    class Letters:
        def decode(self, ids, skip_special_tokens=True):
            return "".join(chr(97 + i % 26) for i in ids)

    target = target_on("cpu")
    target.tokenizer = Letters()
    free = Decoder(target, None).decode([RAGGED[0]], max_new_tokens=40, ignore_eos=True)[0]
    end, text = free.token_ids[17], target.tokenizer.decode(free.token_ids)
    for options, reason in (
        (dict(eos_token_ids=end), "eos"),
        (dict(ignore_eos=True), "length"),
        (dict(ignore_eos=True, stop_strings=[text[20:23]]), "stop_string"),
    ):
        eager, whole = (
            Decoder(target, drafters_for(target)["early_exit"], 2, rounds=mode).decode(
                RAGGED, max_new_tokens=40, lookahead=4, **options
            )
            for mode in ("eager", "whole")
        )
        assert told(whole) == told(eager) and whole[0].finish_reason == reason
        assert [o.text for o in whole] == [o.text for o in eager]


@pytest.mark.parametrize("mode", ["split", "whole"])
@pytest.mark.parametrize("call", [1, 2, 3, 7])
def test_an_exception_while_recording_leaves_the_decoder_usable(call, mode, tapes):
    drafter = RaisesAt(ALL["early_exit"], call)
    decoder = Decoder(TARGET, drafter, 2, rounds=mode)
    options = dict(max_new_tokens=12, ignore_eos=True)
    if call <= 3:
        with pytest.raises(ZeroDivisionError):
            decoder.decode(RAGGED, lookahead=3, **options)
    else:  # the second capture, of another K, with the first still good
        decoder.decode(RAGGED, lookahead=3, **options)
        drafter.call = drafter.calls + 2
        with pytest.raises(ZeroDivisionError):
            decoder.decode(RAGGED, lookahead=2, **options)
    drafter.call = 0
    expected = Decoder(TARGET, ALL["early_exit"], 2, rounds="eager").decode(RAGGED, lookahead=3, **options)
    assert told(decoder.decode(RAGGED, lookahead=3, **options)) == told(expected)


@torch.inference_mode()
def test_an_exception_while_recording_leaves_the_rows_as_they_were(tapes):
    rows = placed(drafter := RaisesAt(ALL["early_exit"], 3))
    before = state_of(rows)
    rounds = graphs.GraphedRounds(drafter, rows, sampler_of(), whole=True, recorder=TapeRecorder("cpu"))
    with pytest.raises(ZeroDivisionError):
        rounds(3, Stopwatch(TARGET.device))
    assert state_of(rows) == before
    rounds(3, Stopwatch(TARGET.device))()
    assert rows.lengths_B.tolist() > before[0]


def test_a_drafter_that_reads_the_host_is_run_from_python_with_a_warning(tapes):
    drafter = ReadsTheHost(ALL["early_exit"])
    options = dict(max_new_tokens=70, lookahead=3, ignore_eos=True)
    with pytest.warns(UserWarning, match="reads_the_host: rounds are launched from Python"):
        outputs = Decoder(TARGET, drafter, 2, rounds="auto").decode(RAGGED, **options)
    assert told(outputs) == told(Decoder(TARGET, ALL["early_exit"], 2, rounds="eager").decode(RAGGED, **options))
    with pytest.raises(NotCapturable):
        Decoder(TARGET, drafter, 2, rounds="whole").decode(RAGGED, **options)


def placed(drafter, rows=2, capacity=200):
    state = Rows(TARGET, rows, capacity)
    state.set_eos([96])
    drafter.start(state)
    for row in range(rows):
        ids = prompt_ids(9 + row, seed=row)
        if hasattr(drafter, "learn"):
            drafter.learn([prompt_ids(9 + row, seed=row) + list(range(20)) for row in range(rows)])
        state.place(row, ids, 100, row)
        prefill(TARGET, drafter, state, row, 0, len(ids) - 1)
    return state


@pytest.mark.parametrize(("drafter", "rule"), PAIRS)
@torch.inference_mode()
def test_a_graph_holds_the_memory_it_reads_and_nothing_else_is_left_of_a_round(drafter, rule, tapes):
    """No memo is written by the third run, and all that it uses was there, and is held since, the second."""
    rows, recorder = placed(ALL[drafter]), TapeRecorder("cpu")
    rounds = graphs.GraphedRounds(ALL[drafter], rows, sampler_of(rule), whole=True, recorder=recorder)
    num_drafted = 0 if drafter == "none" else 3
    kept = addresses(rows)
    rounds(num_drafted, Stopwatch(TARGET.device))()
    (recording,) = recorder.recordings
    held = {storage.data_ptr() for storage in recording.inputs}
    assert recording.graphs[0].external() <= held
    assert addresses(rows) == kept

    (_, extent), *_ = rounds._captured
    with rows.reading(extent), Made() as made:
        report = decode_round(TARGET, ALL[drafter], rows, num_drafted, rounds.sampler, Stopwatch(TARGET.device))
    del report
    gc.collect()
    assert not made.alive()


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


def test_extents_are_few_and_not_much_too_long():
    for most in (64, 640, 8192, 131072):
        extents = {graphs.bucket(needed, most) for needed in range(1, most + 1)}
        assert len(extents) <= 8 + 8 * max(0, (most // 2048).bit_length() - 1)
        for needed in range(1, most + 1):
            extent = graphs.bucket(needed, most)
            assert needed <= extent <= most and extent - needed <= max(graphs.EXTENT_BUCKET, needed / 8)


def test_capturing_is_off_the_clock(tapes, monkeypatch):
    import time

    class Slow(TapeRecorder):
        def record(self, parts):
            time.sleep(0.5)
            return super().record(parts)

    monkeypatch.setattr(graphs, "CudaRecorder", Slow)
    begin = time.perf_counter()
    decoder = Decoder(TARGET, ALL["early_exit"], rounds="whole")
    output = decoder.decode([RAGGED[0]], max_new_tokens=4)[0]
    assert time.perf_counter() - begin > 0.5
    assert the_rounds(decoder).capture_s > 0.5
    assert output.decode_s < 0.5 and sum(r.other_s for r in output.rounds) < 0.5


def test_what_python_takes_part_in_is_not_captured(tapes):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoder = Decoder(TARGET, ALL["early_exit"], rounds="auto")
        decoder.decode([RAGGED[0]], max_new_tokens=4, processors=[lambda ids, scores: scores])
    assert not tapes and not decoder.rows.rounds
    with pytest.raises(UserError, match="no HF processors"):
        Decoder(TARGET, None, rounds="whole").decode([[5]], processors=[lambda ids, scores: scores])
    with pytest.raises(UserError, match="rounds='fast' is unknown"):
        Decoder(TARGET, None, rounds="fast")
