"""How a round is run: eagerly, as one CUDA graph, or as two (draft; verify, accept and commit).

On a GPU a round is hundreds of small kernels, and launching them from Python costs more than running them. Everything a
round reads and writes lies in `Rows` and never moves, nothing in it reads the host, and shapes depend on (rows, K,
extent) alone, so it can be captured once per such shape and replayed. Capture and its warm-up run with all rows idle:
they write to the trash slots and to the tentative area only, so no state has to be saved or restored.

The noise is a function of (seed, request, position), so replays need no generator state; the seed is a tensor here.
The same code runs eagerly on the CPU, where the tests check what a graph relies on: fixed shapes, fixed addresses, no
host reads (tests/decoding/test_rounds.py); `pytest -m gpu` checks the graphs themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from selfspec.decoding.round import decode_round, settle, verify
from selfspec.decoding.rows import Rows
from selfspec.decoding.sampler import Sampler
from selfspec.decoding.stopwatch import Stopwatch
from selfspec.drafters.base import Draft, Drafter
from selfspec.errors import UserError

EXTENT_BUCKET = 256  # slots; one graph per bucket, and attention reads at most this many stale slots
WARMUPS = 2
Read = Callable[[], list[list[float]]]
MODES = ("auto", "eager", "split", "whole")


class Rounds(Protocol):
    """Runs one round; `lag` is how many rounds its results may be read late."""

    lag: int

    def __call__(self, num_drafted: int, stopwatch: Stopwatch) -> Read:
        """Starts a round; calling what it returns waits for the round and reads its report (`Rows.commit`)."""


@dataclass
class EagerRounds:
    """Every operator launched from Python: the CPU, and whatever cannot be captured."""

    drafter: Drafter
    rows: Rows
    sampler: Sampler
    lag: int = 0

    def __call__(self, num_drafted: int, stopwatch: Stopwatch) -> Read:
        return decode_round(self.rows.target, self.drafter, self.rows, num_drafted, self.sampler, stopwatch).tolist


class GraphedRounds:
    """Whole rounds, or the two halves of a round, as CUDA graphs: one per (K, extent bucket)."""

    def __init__(self, drafter: Drafter, rows: Rows, sampler: Sampler, whole: bool) -> None:
        self.drafter, self.rows, self.whole = drafter, rows, whole
        self.seed = torch.tensor(0, dtype=torch.int64, device=rows.device)
        self.sampler = replace(sampler, seed=self.seed)
        self.lag = 1 if whole else 0
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[tuple[int, int], list[torch.cuda.CUDAGraph]] = {}
        self._reports: dict[tuple[int, int], Tensor] = {}
        self.reseed(sampler)

    def reseed(self, sampler: Sampler) -> None:
        """A new seed for the same transforms and rule: no new capture."""
        self.seed.fill_(int(sampler.seed))

    def __call__(self, num_drafted: int, stopwatch: Stopwatch) -> Read:
        # the host knows the lengths of `lag` rounds ago: each may have added K+1 tokens since
        needed = self.rows.extent(0, (num_drafted + 1) * (self.lag + 1))
        extent = min(-(-needed // EXTENT_BUCKET) * EXTENT_BUCKET, self.rows.cache.num_slots)
        key = (num_drafted, extent)
        if key not in self._graphs:
            self._capture(key)
        for graph, phase in zip(self._graphs[key], ("draft", "verify"), strict=False):
            graph.replay()
            if not self.whole:
                stopwatch.mark(phase)
        return _to_host(self._reports[key])

    def _capture(self, key: tuple[int, int]) -> None:
        num_drafted, extent = key
        draft: list[Draft] = []
        report: list[Tensor] = []

        def first_half() -> None:
            draft[:] = [self.drafter.propose(self.rows, num_drafted, self.sampler)]

        def second_half() -> None:
            logits_BTV = verify(self.rows.target, self.rows, draft[0])
            report[:] = [settle(self.rows, draft[0], logits_BTV, self.sampler)]

        def both() -> None:
            first_half()
            second_half()

        with self.rows.idle(extent):
            self._graphs[key] = self._record([both] if self.whole else [first_half, second_half])
        self._reports[key] = report[0]

    def _record(self, parts: list[Callable[[], None]]) -> list[torch.cuda.CUDAGraph]:
        """Warm up on a side stream, then capture each part in turn. An error leaves nothing half-captured behind."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUPS):
                for part in parts:
                    part()
        torch.cuda.current_stream().wait_stream(side)
        graphs = []
        for part in parts:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                part()
            graphs.append(graph)
        return graphs


def _to_host(report: Tensor) -> Read:
    """Copy a report behind the round that makes it; the next replay, which overwrites it, is queued behind the copy."""
    pinned = torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
    pinned.copy_(report, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def read() -> list[list[float]]:
        arrived.synchronize()
        return pinned.tolist()

    return read


def choose_rounds(drafter: Drafter, rows: Rows, sampler: Sampler, mode: str = "auto") -> Rounds:
    """ "auto": whole-round graphs on CUDA where the transforms are built-in ones, else eager.

    UserError for a graph on a CPU, or around a caller's processors, which are Python.
    """
    if mode not in MODES:
        raise UserError(f"rounds={mode!r} is unknown. Allowed: {', '.join(MODES)}.")
    capturable = rows.device.type == "cuda" and not getattr(sampler.transforms, "processors", ())
    if mode in ("split", "whole") and not capturable:
        raise UserError(f"rounds={mode!r} needs a CUDA device and no HF processors. Use rounds='auto' or 'eager'.")
    if mode == "eager" or not capturable:
        return EagerRounds(drafter, rows, sampler)
    key = (mode, id(drafter), repr(getattr(sampler.transforms, "sampling", None)), sampler.rule.name)
    rounds = rows.rounds.get(key)
    if isinstance(rounds, GraphedRounds):
        rounds.reseed(sampler)
        return rounds
    rows.rounds[key] = rounds = GraphedRounds(drafter, rows, sampler, whole=mode != "split")
    return rounds
