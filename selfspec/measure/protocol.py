"""The measuring protocol: one process, methods alternating prompt by prompt in balanced order, after a warm-up.

A machine that is slower this minute then slows all methods of a prompt alike; none is always first, and none always
follows the same other one (`selfspec.measure.order`). Speedups are ratios within a prompt (see selfspec.report), so
what remains is noise and not drift.

Records are yielded as soon as the prompt's autoregressive tokens are known, because each is compared with them; a
consumer that writes them one by one loses at most the prompt being measured when it is killed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from selfspec.measure.memory import Memory, growth, rise
from selfspec.measure.order import balanced
from selfspec.records import Key, PromptRecord, RoundRecord

if TYPE_CHECKING:
    from selfspec.measure.tracing import Recorder

AR = "ar"  # our loop without a draft: what every method is compared with
AR_AGAIN = "ar_again"  # the same once more: the ratio of the two says how quiet the machine was
HF = "hf_generate"
WARMUP_PASSES = 2  # the first makes kernels and allocations, the second shows that they are there


class Output(Protocol):
    """What a method returns for one prompt: `selfspec.decode`'s Output, or the plain HF baseline's."""

    token_ids: list[int]
    text: str
    finish_reason: str
    lossy: bool
    rounds: list[RoundRecord]
    prefill_s: float
    ttft_s: float
    decode_s: float
    alpha_sum: float | None
    alpha_count: int


@dataclass
class Method:
    """One row of the table. `generate(prompt token ids, max_new_tokens, seed)` times itself.

    `memory`: what stays allocated for it, the target included, while it does not run. `trace`: the same generation
    once more, round by round (selfspec.measure.tracing), where a method has rounds.
    """

    label: str
    generate: Callable[[list[int], int, int], Output]
    synthetic: bool = False
    memory: Memory = field(default_factory=Memory)
    trace: Callable[[list[int], int, int], Recorder] | None = None


@dataclass(frozen=True)
class Item:
    """One turn of one prompt, tokenised once for all methods; `follow(answer)` is the next turn, if there is one."""

    prompt_id: str
    category: str
    token_ids: list[int]
    follow: Callable[[str], Item] | None = None


def warm_up(methods: Sequence[Method], items: Sequence[Item], new_tokens: int, device: torch.device) -> Iterator[str]:
    """Runs every method on the shortest and the longest prompt, so that every shape has been seen; yields the labels.

    The first run of a method allocates what it keeps: that is added to `method.memory`.
    """
    by_length = sorted(items, key=lambda item: len(item.token_ids))
    for item in (by_length[-1], by_length[0]):
        for method in methods:
            for _ in range(WARMUP_PASSES):
                with growth(device) as grown:
                    method.generate(item.token_ids, new_tokens, 0)
                method.memory += grown
            yield method.label


def request_seed(seed: int, prompt_id: str, repeat: int) -> int:
    """One seed per prompt and repeat, the same for every method and independent of which other prompts run."""
    digest = hashlib.sha256(f"{seed}/{prompt_id}/{repeat}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def measure(
    methods: Sequence[Method],
    items: Sequence[Item],
    *,
    max_new_tokens: int,
    repeats: int,
    seed: int,
    device: torch.device,
    compare: Callable[[PromptRecord, PromptRecord, Item], None],
    done: Mapping[Key, PromptRecord],
) -> Iterator[PromptRecord]:
    """Every (prompt, method, repeat) that is not in `done`, as records.

    `compare(record, autoregressive record, item)` fills in whether the tokens are the same. A further turn of a prompt
    continues from the autoregressive answer, for all methods alike.
    """
    for repeat in range(repeats):
        for index, first_turn in enumerate(items):
            item: Item | None = first_turn
            while item is not None:
                reference = done.get((item.prompt_id, AR, repeat))
                waiting: list[PromptRecord] = []
                for method in balanced(methods, index + repeat):
                    if (item.prompt_id, method.label, repeat) in done:
                        continue
                    record = run_once(method, item, repeat, max_new_tokens, seed, device)
                    waiting.append(record)
                    if method.label == AR:
                        reference = record
                    if reference is not None:
                        for record in waiting:
                            compare(record, reference, item)
                            yield record
                        waiting.clear()
                assert reference is not None, "the autoregressive baseline is always one of the methods"
                item = item.follow(reference.text) if item.follow else None


def run_once(
    method: Method, item: Item, repeat: int, max_new_tokens: int, seed: int, device: torch.device
) -> PromptRecord:
    """One generation, measured."""
    with rise(device) as risen:
        output = method.generate(item.token_ids, max_new_tokens, request_seed(seed, item.prompt_id, repeat))
    peak = method.memory + risen
    return PromptRecord(
        prompt_id=item.prompt_id,
        category=item.category,
        method=method.label,
        repeat=repeat,
        num_prompt_tokens=len(item.token_ids),
        token_ids=output.token_ids,
        text=output.text,
        finish_reason=output.finish_reason,
        lossy=output.lossy,
        prefill_s=output.prefill_s,
        ttft_s=output.ttft_s,
        decode_s=output.decode_s,
        total_s=output.prefill_s + output.decode_s,
        alpha_sum=output.alpha_sum,
        alpha_count=output.alpha_count,
        synthetic=method.synthetic,
        peak_device_bytes=peak.device_bytes,
        peak_host_bytes=peak.host_bytes,
        rounds=output.rounds,
    )
