"""Methods alternate in balanced order on the same prompts and seeds, and nothing that is done is done again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch

from selfspec.measure.protocol import AR, Item, Method, measure, request_seed, warm_up
from selfspec.records import PromptRecord, RoundRecord

CPU = torch.device("cpu")


@dataclass
class FakeOutput:
    token_ids: list[int]
    text: str = "answer"
    finish_reason: str = "length"
    lossy: bool = False
    rounds: list[RoundRecord] = field(default_factory=list)
    prefill_s: float = 0.25
    ttft_s: float = 0.5
    decode_s: float = 1.0
    alpha_sum: float | None = None
    alpha_count: int = 0


class Calls:
    """Methods that note each call: (label, prompt ids, max_new_tokens, seed)."""

    def __init__(self, *labels: str) -> None:
        self.calls: list[tuple[str, tuple[int, ...], int, int]] = []
        self.methods = [Method(label, self._generate(label)) for label in labels]

    def _generate(self, label: str):
        def generate(prompt_ids: list[int], max_new_tokens: int, seed: int) -> FakeOutput:
            self.calls.append((label, tuple(prompt_ids), max_new_tokens, seed))
            return FakeOutput([1] * max_new_tokens)

        return generate


def _items(count: int) -> list[Item]:
    return [Item(f"p{i}", "chat", list(range(1, i + 2))) for i in range(count)]


def _measure(calls: Calls, items: list[Item], repeats: int = 1, done=None, compare=None) -> list[PromptRecord]:
    return list(
        measure(
            calls.methods,
            items,
            max_new_tokens=3,
            repeats=repeats,
            seed=0,
            device=CPU,
            compare=compare or (lambda record, reference, item: None),
            done=done or {},
        )
    )


def test_methods_alternate_prompt_by_prompt_and_each_is_equally_often_first() -> None:
    calls = Calls("hf_generate", AR, "early_exit")
    _measure(calls, _items(6))
    by_prompt = [calls.calls[start : start + 3] for start in range(0, 18, 3)]
    assert all(len({call[1] for call in group}) == 1 for group in by_prompt), "one prompt at a time"
    assert all({call[0] for call in group} == {"hf_generate", AR, "early_exit"} for group in by_prompt)
    assert Counter(group[0][0] for group in by_prompt) == {"hf_generate": 2, AR: 2, "early_exit": 2}


def test_all_methods_get_the_same_seed_and_prompts_get_different_ones() -> None:
    calls = Calls(AR, "early_exit")
    _measure(calls, _items(3), repeats=2)
    seeds_of_prompt: dict[tuple[int, ...], set[int]] = {}
    for _, prompt_ids, _, seed in calls.calls:
        seeds_of_prompt.setdefault(prompt_ids, set()).add(seed)
    assert all(len(seeds) == 2 for seeds in seeds_of_prompt.values()), "one per repeat"
    assert len(set().union(*seeds_of_prompt.values())) == 6


def test_a_seed_depends_on_nothing_but_seed_prompt_and_repeat() -> None:
    assert request_seed(0, "chat-01", 0) == request_seed(0, "chat-01", 0)
    assert len({request_seed(s, p, r) for s in (0, 1) for p in ("a", "b") for r in (0, 1)}) == 8
    assert 0 <= request_seed(0, "chat-01", 0) < 2**31


def test_what_is_done_is_not_measured_again_and_still_serves_as_reference() -> None:
    first = _measure(Calls(AR, "early_exit"), _items(2))
    kept = {record.key: record for record in first if record.key != ("p1", "early_exit", 0)}
    references = []
    calls = Calls(AR, "early_exit")
    again = _measure(calls, _items(2), done=kept, compare=lambda record, reference, item: references.append(reference))
    assert [record.key for record in again] == [("p1", "early_exit", 0)]
    assert references == [kept["p1", AR, 0]]


def test_every_record_is_compared_with_the_autoregressive_one_of_its_prompt() -> None:
    pairs = []
    _measure(
        Calls("hf_generate", AR, "ngram"),
        _items(3),
        compare=lambda record, ref, item: pairs.append((record.key, ref.key)),
    )
    assert len(pairs) == 9
    assert all(reference == (key[0], AR, key[2]) for key, reference in pairs)


def test_a_further_turn_continues_from_the_autoregressive_answer() -> None:
    follow = [Item("a", "chat", [1], follow=lambda answer: Item("a#2", "chat", [1, len(answer)]))]
    calls = Calls(AR, "early_exit")
    records = _measure(calls, follow)
    assert [record.prompt_id for record in records] == ["a", "a", "a#2", "a#2"]
    assert {call[1] for call in calls.calls[2:]} == {(1, len("answer"))}


def test_total_time_is_prefill_and_decode() -> None:
    (record,) = _measure(Calls(AR), _items(1))
    assert record.total_s == pytest.approx(record.prefill_s + record.decode_s)


def test_warm_up_runs_every_method_on_the_shortest_and_the_longest_prompt() -> None:
    calls = Calls(AR, "early_exit")
    labels = list(warm_up(calls.methods, _items(4), 5, CPU))
    assert labels == [AR, "early_exit"] * 2
    assert {(label, len(prompt_ids)) for label, prompt_ids, _, _ in calls.calls} == {
        (label, length) for label in (AR, "early_exit") for length in (1, 4)
    }
    assert {call[2] for call in calls.calls} == {5}
