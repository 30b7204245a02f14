"""Rounds as graphs, on the CPU: recorded operators instead of CUDA graphs, everything else as it runs on a GPU."""

from __future__ import annotations

import warnings

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
    drafters_for,
    placed,
    sampler_of,
    state_of,
    target_on,
    the_rounds,
    told,
)
from op_tape import TapeRecorder

from selfspec import Decoder, Sampling, UserError
from selfspec.decoding import graphs
from selfspec.decoding.capture import NotCapturable
from selfspec.decoding.stopwatch import Stopwatch
from selfspec.lookahead import Plan
from selfspec.sampling.acceptance import Verdict
from tiny_models import prompt_ids

TARGET = target_on("cpu")
ALL = drafters_for(TARGET)


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
            return Plan(12 if self.calls % 2 else 1)

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


class Constant:
    """A rule of the caller's own, with a setting: every round emits this token."""

    name, lossy, needs_q = "constant", True, False

    def __init__(self, token):
        self.token = token

    def draw(self, logits_BV, noise):
        return logits_BV.argmax(-1), None

    def accept(self, drafted_BK, q_BKV, num_drafted_B, logits_BTV, noise):
        zeros_B = torch.zeros_like(num_drafted_B)
        return Verdict(zeros_B, zeros_B + self.token, zeros_B)


def test_a_rules_own_settings_and_its_tree_form_are_part_of_the_key(tapes):
    decoder = Decoder(TARGET, ALL["early_exit"], capacity=200, rounds="whole")
    options = dict(max_new_tokens=8, ignore_eos=True)
    for token in (5, 6):
        assert decoder.decode([RAGGED[0]], acceptance=Constant(token), **options)[0].token_ids == [token] * 8
    expected = told(Decoder(TARGET, None).decode([RAGGED[0]], **options))[0][0]
    for lookahead in (3, {"kind": "tree", "branches": [2, 2]}, 3):
        assert decoder.decode([RAGGED[0]], lookahead=lookahead, **options)[0].token_ids == expected


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
    rows = placed(TARGET, drafter := RaisesAt(ALL["early_exit"], 3))
    before = state_of(rows)
    rounds = graphs.GraphedRounds(drafter, rows, sampler_of("greedy", TARGET), whole=True, recorder=TapeRecorder("cpu"))
    with pytest.raises(ZeroDivisionError):
        rounds(Plan(3), Stopwatch(TARGET.device))
    assert state_of(rows) == before
    rounds(Plan(3), Stopwatch(TARGET.device))()
    assert rows.lengths_B.tolist() > before[0]


def test_a_drafter_that_reads_the_host_is_run_from_python_with_a_warning(tapes):
    drafter = ReadsTheHost(ALL["early_exit"])
    options = dict(max_new_tokens=70, lookahead=3, ignore_eos=True)
    with pytest.warns(UserWarning, match="reads_the_host: rounds are launched from Python"):
        outputs = Decoder(TARGET, drafter, 2, rounds="auto").decode(RAGGED, **options)
    assert told(outputs) == told(Decoder(TARGET, ALL["early_exit"], 2, rounds="eager").decode(RAGGED, **options))
    with pytest.raises(NotCapturable):
        Decoder(TARGET, drafter, 2, rounds="whole").decode(RAGGED, **options)


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
