"""Who gets a row when, and what runs between two rounds: none of it may change a token, and none may stall the others.

Everything is float32 and compared with one-row decoding of the same requests.
"""

from __future__ import annotations

import functools
import itertools

import pytest

from selfspec import Decoder, Sampling, UserError, build_drafter, decode, wrap_target
from selfspec.cache.storage import CHUNKS_CPU
from selfspec.decoding import loop
from tiny_models import prompt_ids, tiny_llama

DRAFTERS = ("none", "early_exit", "independent", "ngram")
LENGTHS = (150, 1, 64, 9, 200, 65, 2, 129)  # whole chunks, a chunk and one token, single tokens, several chunks
COUNTS = [3, 17, 1, 9, 5, 12, 20, 2]
PROMPTS = [prompt_ids(length, seed=length) for length in LENGTHS]
COUPLED = dict(sampling=Sampling(temperature=0.9, top_p=0.95), acceptance="coupled", seed=5)


@functools.cache
def target():
    return wrap_target(tiny_llama())


@functools.cache
def drafter(name):
    options = {"early_exit": {"exit_layer": 2}, "independent": {"model": wrap_target(tiny_llama(seed=5, num_layers=2))}}
    return None if name == "none" else build_drafter(name, target(), **options.get(name, {}))


@functools.cache
def alone(sampled=False):
    """Each request by itself, autoregressively: what every schedule has to reproduce."""
    options = COUPLED if sampled else {}
    outputs = decode(target(), None, PROMPTS, max_new_tokens=COUNTS, ignore_eos=True, **options)
    return [output.token_ids for output in outputs]


def served(name, num_rows, lookahead=3, cache="contiguous", **options):
    decoder = Decoder(target(), drafter(name), max_batch_rows=num_rows, cache=cache)
    return decoder.decode(PROMPTS, max_new_tokens=COUNTS, lookahead=lookahead, ignore_eos=True, **options)


def tokens(outputs):
    return [output.token_ids for output in outputs]


# ---- tokens


def test_each_request_gets_its_own_number_of_tokens():
    assert [len(token_ids) for token_ids in alone()] == COUNTS
    assert len({tuple(token_ids[:2]) for token_ids in alone()}) == len(COUNTS), "the requests must be told apart"


@pytest.mark.parametrize("interleave", [True, False], ids=["interleaved", "whole"])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 8])
@pytest.mark.parametrize("name", DRAFTERS)
def test_prompts_run_in_chunks_between_rounds_leave_every_token_as_it_was(name, num_rows, interleave):
    assert tokens(served(name, num_rows, interleave_prefill=interleave)) == alone()


@pytest.mark.parametrize("name", DRAFTERS)
def test_prompts_that_share_a_beginning_are_run_in_chunks_on_a_paged_cache(name):
    """The first prompt is run and published before the second is placed; what the third shares is still being run."""
    assert tokens(served(name, 3, cache="paged")) == alone()
    shared = prompt_ids(100, seed=9)
    prompts = [shared + prompt_ids(length, seed=length) for length in (70, 1, 130, 40, 3)]
    options = dict(max_new_tokens=[12, 3, 9, 7, 15], ignore_eos=True)
    expected = tokens(decode(target(), None, prompts, **options))
    outputs = Decoder(target(), drafter(name), 3, cache="paged").decode(prompts, **options)
    assert tokens(outputs) == expected
    if name in ("none", "ngram"):
        assert outputs[1].num_reused_tokens >= 96, "all whole blocks of the shared beginning"


@pytest.mark.parametrize("name", DRAFTERS)
def test_coupled_samples_are_the_same_for_any_number_of_rows_and_any_schedule(name):
    expected = alone(sampled=True)
    assert expected != alone()
    for num_rows, interleave in itertools.product((2, 5), (True, False)):
        assert tokens(served(name, num_rows, interleave_prefill=interleave, **COUPLED)) == expected


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "coupled"])
@pytest.mark.parametrize("order", [(7, 6, 5, 4, 3, 2, 1, 0), (3, 0, 6, 1, 7, 4, 2, 5)])
def test_requests_that_come_in_another_order_are_answered_the_same(order, sampled):
    arrivals = [0.01 * order.index(index) for index in range(len(order))]
    outputs = served("early_exit", 2, arrivals_s=arrivals, **(COUPLED if sampled else {}))
    assert tokens(outputs) == alone(sampled)
    admitted = sorted(range(len(order)), key=lambda index: outputs[index].admitted_s)
    assert admitted == list(order)


def test_a_drafter_that_writes_while_a_prompt_is_run_does_not_write_into_it():
    """Drafts and commits of a round write to all rows; a row whose prompt is being run must not notice."""
    decoder = Decoder(target(), drafter("ngram"), max_batch_rows=2)
    prompts = [prompt_ids(3), prompt_ids(200, seed=1)]  # the first decodes while the second is run
    expected = tokens(decode(target(), None, prompts, max_new_tokens=30, ignore_eos=True))
    for lookahead in (1, 7):
        outputs = decoder.decode(prompts, max_new_tokens=30, lookahead=lookahead, ignore_eos=True)
        assert tokens(outputs) == expected


# ---- what runs when


class Diary:
    """What the engine did, in order: ("chunk", row, tokens) and ("round", rows that take part)."""

    def __init__(self, monkeypatch):
        self.entries = []
        prefill, choose_rounds = loop.prefill, loop.choose_rounds

        def noted_prefill(target, drafter, rows, row, start, end):
            self.entries.append(("chunk", row, end - start))
            prefill(target, drafter, rows, row, start, end)

        def noted_rounds(drafter, rows, sampler, mode, stopping):
            rounds = choose_rounds(drafter, rows, sampler, mode, stopping)

            def one_round(plan, stopwatch):
                self.entries.append(("round", rows.active_B.nonzero()[:, 0].tolist()))
                return rounds(plan, stopwatch)

            one_round.lag = rounds.lag
            return one_round

        monkeypatch.setattr(loop, "prefill", noted_prefill)
        monkeypatch.setattr(loop, "choose_rounds", noted_rounds)

    def between_rounds(self):
        """The chunks in front of each round."""
        chunks = [[]]
        for kind, *rest in self.entries:
            if kind == "chunk":
                chunks[-1].append(tuple(rest))
            else:
                chunks.append([])
        return chunks


def test_between_two_rounds_each_row_runs_at_most_one_chunk_of_its_prompt(monkeypatch):
    diary = Diary(monkeypatch)
    served("none", 3)
    first, *later = diary.between_rounds()
    assert first[0] == (0, LENGTHS[0] - 1), "nobody decodes yet: the first prompt is run at once"
    for chunks in [first[1:], *later]:
        assert all(count <= CHUNKS_CPU.between_rounds for _, count in chunks)
        assert len({row for row, _ in chunks}) == len(chunks)
    assert sum(count for _, count in itertools.chain(first, *later)) == sum(LENGTHS) - len(LENGTHS)


def test_without_interleaving_a_long_prompt_is_run_whole_between_two_rounds(monkeypatch):
    diary = Diary(monkeypatch)
    served("none", 3, interleave_prefill=False)
    counts = [count for chunks in diary.between_rounds() for _, count in chunks]
    assert sorted(counts) == sorted(length - 1 for length in LENGTHS)


def test_a_row_that_decodes_gets_a_token_in_every_round_while_a_long_prompt_is_run(monkeypatch):
    diary = Diary(monkeypatch)
    prompts = [prompt_ids(5), prompt_ids(200, seed=1)]
    Decoder(target(), None, max_batch_rows=2).decode(prompts, max_new_tokens=8, ignore_eos=True)
    rounds = [rows for kind, *rest in diary.entries if kind == "round" for rows in rest]
    assert rounds[0] == [0] and rounds[1] == [0, 1], "chunks of 128 and 71 tokens: one round without the second row"


def test_one_row_runs_its_prompts_at_once(monkeypatch):
    diary = Diary(monkeypatch)
    served("none", 1)
    chunks = [chunk for entry in diary.between_rounds() for chunk in entry]
    assert chunks == [(0, length - 1) for length in LENGTHS]


def test_rows_are_refilled_as_they_finish():
    decoder = Decoder(target(), None, max_batch_rows=2)
    outputs = decoder.decode([prompt_ids(4)] * 3, max_new_tokens=[2, 30, 4], ignore_eos=True)
    ends = [output.commit_s[-1] for output in outputs]
    assert ends[0] <= outputs[2].admitted_s < ends[2] < ends[1], "the third ran where the first had ended"


# ---- times


def test_times_of_a_request_are_in_order_and_one_commit_belongs_to_each_round():
    for output in served("early_exit", 3):
        assert 0 == output.arrival_s <= output.admitted_s < output.commit_s[0]
        assert output.commit_s == sorted(output.commit_s) and len(output.commit_s) == len(output.rounds)
        assert output.ttft_s == pytest.approx(output.commit_s[0] - output.admitted_s, abs=1e-6)
        assert output.prefill_s + output.decode_s == pytest.approx(output.commit_s[-1] - output.admitted_s, abs=1e-6)


def test_a_request_is_not_admitted_before_it_arrives_and_an_idle_engine_waits_for_it():
    decoder = Decoder(target(), None, max_batch_rows=2)
    arrivals = [0.3, 0.0, 0.6]
    outputs = decoder.decode([prompt_ids(4)] * 3, max_new_tokens=2, ignore_eos=True, arrivals_s=arrivals)
    for output, arrival_s in zip(outputs, arrivals, strict=True):
        assert output.arrival_s == arrival_s
        assert arrival_s <= output.admitted_s


# ---- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": [4]}, "holds 1 numbers for 2 prompts"),
        ({"max_new_tokens": [4, 0]}, r"max_new_tokens\[1\]=0 is not possible"),
        ({"max_new_tokens": [4, True]}, r"max_new_tokens\[1\]=True"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5"),
        ({"max_new_tokens": "12"}, "max_new_tokens='12'"),
        ({"max_new_tokens": [4, 10_000]}, "10002 positions|positions"),
        ({"arrivals_s": [0.0]}, "holds 1 times for 2 prompts"),
        ({"arrivals_s": [0.0, -1.0]}, r"arrivals_s\[1\]=-1.0"),
        ({"arrivals_s": [0.0, float("nan")]}, r"arrivals_s\[1\]=nan"),
        ({"arrivals_s": [0.0, float("inf")]}, r"arrivals_s\[1\]=inf"),
    ],
)
def test_impossible_counts_and_arrivals_are_refused(options, message):
    decoder = Decoder(target(), None, max_batch_rows=2)
    with pytest.raises(UserError, match=message):
        decoder.decode([prompt_ids(2)] * 2, **options)


def test_no_prompts_no_outputs():
    assert decode(target(), None, [], max_new_tokens=[]) == []
    assert decode(target(), None, [], max_new_tokens=3) == []
