"""How a round is run: eagerly, as one CUDA graph, or as two (draft; verify, accept and commit).

On a GPU a round is hundreds of small kernels, and launching them from Python costs more than running them. Everything a
round reads and writes lies in `Rows` and never moves, nothing in it reads the host, and shapes depend on (rows, K,
extent) alone, so it can be captured once per such shape and replayed. Capturing runs the round with all rows idle: it
writes to the trash slots and to the tentative area only, so no state has to be saved or restored.

What a graph has baked in is in a key: plan (K) and extent here; drafter, policy, transforms, rules and halves in
`choose_rounds`; the ends of sequence in `Rows.set_eos`. The noise is a function of (seed, request, position), so
replays need no generator state; the seed is a tensor here. The same code runs eagerly on the CPU, where the tests check
what a graph relies on and replay recorded operators (tests/decoding/test_rounds.py, tests/gpu); `pytest -m gpu` checks
the graphs themselves.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from selfspec.decoding.capture import CudaRecorder, NotCapturable, Read, Recorder, Recording
from selfspec.decoding.round import begin_draft, decode_round, propose, settle, verify
from selfspec.decoding.rows import Rows
from selfspec.decoding.sampler import Sampler
from selfspec.decoding.stopwatch import Stopwatch
from selfspec.drafters.base import Draft, Drafter, feature_layers_of
from selfspec.errors import UserError
from selfspec.lookahead import Plan, Stopping

EXTENT_BUCKET = 256  # slots; attention reads at most this many stale slots, or an eighth of them all
MAX_GRAPHS = 64  # shapes per drafter and sampling; the one not used for longest goes
MAX_SETTINGS = 8  # drafters and samplings per set of rows
MODES = ("auto", "eager", "split", "whole")


class Rounds(Protocol):
    """Runs one round; `lag` is how many rounds its results may be read late."""

    lag: int

    def __call__(self, plan: Plan, stopwatch: Stopwatch) -> Read:
        """Starts a round; calling what it returns waits for the round and reads its report (`Rows.commit`)."""


@dataclass
class EagerRounds:
    """Every operator launched from Python: the CPU, and whatever cannot be captured."""

    drafter: Drafter
    rows: Rows
    sampler: Sampler
    stopping: Stopping | None = None
    lag: int = 0

    def __call__(self, plan: Plan, stopwatch: Stopwatch) -> Read:
        on_host = self.rows.device.type == "cpu"  # elsewhere looking at the draft would stall the device
        drafting = begin_draft(self.rows, plan, self.sampler, self.stopping, may_look=on_host)
        return decode_round(self.rows.target, self.drafter, self.rows, drafting, self.sampler, stopwatch).tolist


@dataclass
class Captured:
    """A round of one shape, and where it leaves its report."""

    recording: Recording
    report: Tensor


class GraphedRounds:
    """Whole rounds, or the two halves of a round, as graphs: one recording per (plan, extent).

    fall_back: what cannot be captured is launched from Python, with a warning; else it is an error.
    """

    def __init__(
        self,
        drafter: Drafter,
        rows: Rows,
        sampler: Sampler,
        whole: bool,
        recorder: Recorder,
        fall_back: bool = False,
        stopping: Stopping | None = None,
    ) -> None:
        self.drafter, self.stopping, self.whole, self.fall_back = drafter, stopping, whole, fall_back
        self.seed = torch.tensor(0, dtype=torch.int64, device=rows.device)
        self.sampler = replace(sampler, seed=self.seed)
        self.lag = 1 if whole else 0
        self.num_captures, self.capture_s = 0, 0.0
        self._rows = weakref.ref(rows)  # the rows hold this object: in a cycle their cache would outlive them
        self._recorder = recorder
        self._captured: OrderedDict[tuple[Plan, int], Captured] = OrderedDict()
        self._capturable = True
        self._unread: deque[int] = deque(maxlen=self.lag)  # tokens that rounds not yet read may have added to a row
        self.reseed(sampler)

    @property
    def rows(self) -> Rows:
        rows = self._rows()
        assert rows is not None, "rounds do not outlive their rows"
        return rows

    def reseed(self, sampler: Sampler) -> None:
        """A new seed for the same transforms and rule: no new capture. Any integer, as in `splitmix64`."""
        seed = int(sampler.seed) % 2**64
        self.seed.fill_(seed - 2**64 if seed >= 2**63 else seed)

    def __call__(self, plan: Plan, stopwatch: Stopwatch) -> Read:
        rows = self.rows
        extent = bucket(rows.extent(0, plan.width) + sum(self._unread), rows.cache.num_slots)
        self._unread.append(plan.width)
        if self._capturable and (plan, extent) not in self._captured:
            with stopwatch.paused():
                self._capture(plan, extent)
        if not self._capturable:
            return self._recorder.to_host(self._launch(plan, extent))
        self._captured.move_to_end((plan, extent))
        captured = self._captured[plan, extent]
        for graph, phase in zip(captured.recording.graphs, ("draft", "verify"), strict=False):
            graph.replay()
            if not self.whole:
                stopwatch.mark(phase)
        return self._recorder.to_host(captured.report)

    def _capture(self, plan: Plan, extent: int) -> None:
        rows, begin = self.rows, time.perf_counter()
        draft: list[Draft] = []
        report: list[Tensor] = []
        untimed = Stopwatch(rows.device, wait=False)

        def first_half() -> None:
            drafting = begin_draft(rows, plan, self.sampler, self.stopping)
            draft[:] = [propose(self.drafter, rows, drafting)]

        def second_half() -> None:
            logits_BTV, features_BTF = verify(rows.target, rows, draft[0], feature_layers_of(self.drafter))
            report[:] = [settle(self.drafter, rows, draft[0], logits_BTV, features_BTF, self.sampler, untimed)]

        def both() -> None:
            first_half()
            second_half()

        try:
            with rows.idle(extent):
                recording = self._recorder.record([both] if self.whole else [first_half, second_half])
        except NotCapturable as error:
            if not self.fall_back:
                raise
            warnings.warn(f"{self.drafter.name}: rounds are launched from Python. {error}", stacklevel=2)
            self._capturable = False
            return
        self._captured[plan, extent] = Captured(recording, report[0])
        if len(self._captured) > MAX_GRAPHS:
            self._captured.popitem(last=False)
        self.num_captures += 1
        self.capture_s += time.perf_counter() - begin

    def _launch(self, plan: Plan, extent: int) -> Tensor:
        """The same round without a graph; the host's lengths may be a round old, so the extent is given here too."""
        rows = self.rows
        with rows.reading(extent):
            drafting = begin_draft(rows, plan, self.sampler, self.stopping)
            untimed = Stopwatch(rows.device, wait=False)
            return decode_round(rows.target, self.drafter, rows, drafting, self.sampler, untimed)


def bucket(num_slots: int, most: int) -> int:
    """The extent that a graph is captured for: few of them, at most `EXTENT_BUCKET` slots or an eighth too long."""
    step = max(EXTENT_BUCKET, (1 << (num_slots - 1).bit_length()) // 16)
    return min(-(-num_slots // step) * step, most)


def choose_rounds(
    drafter: Drafter, rows: Rows, sampler: Sampler, mode: str = "auto", stopping: Stopping | None = None
) -> Rounds:
    """ "auto": whole-round graphs on CUDA where the transforms are built-in ones, else eager.

    UserError for a graph on a CPU, or around what is Python: a caller's processors, a drafter with `reads_host`. (A
    host read in every round is found when it is recorded; one in some rounds only would be left out for good.)
    """
    check_mode(mode)
    capturable = can_be_captured(rows, sampler) and not getattr(drafter, "reads_host", False)
    if mode in ("split", "whole") and not capturable:
        raise UserError(
            f"rounds={mode!r} needs a CUDA device, no HF processors, and a drafter that leaves the host alone. Use "
            "rounds='auto' or 'eager'."
        )
    if mode == "eager" or not capturable:
        return EagerRounds(drafter, rows, sampler, stopping)
    whole, strict = mode != "split", mode != "auto"
    settings = getattr(sampler.transforms, "sampling", None)
    transforms = id(sampler.transforms) if settings is None else repr(settings)
    rules = baked(sampler.rule), baked(sampler.tree_rule)
    key = (whole, strict, id(drafter), id(stopping), transforms, *rules)
    rounds = rows.rounds.pop(key, None)
    if isinstance(rounds, GraphedRounds):
        rounds.reseed(sampler)
    else:
        recorder = CudaRecorder(rows.device)
        rounds = GraphedRounds(drafter, rows, sampler, whole, recorder, fall_back=not strict, stopping=stopping)
    rows.rounds[key] = rounds  # the last in order of use
    if len(rows.rounds) > MAX_SETTINGS:
        del rows.rounds[next(iter(rows.rounds))]
    return rounds


def baked(rule: object) -> object:
    """What a graph holds of a rule: of one without attributes its type, else that very rule, which lives as long."""
    return id(rule) if getattr(rule, "__dict__", None) else type(rule)


def check_mode(mode: str) -> str:
    """One of MODES, or UserError."""
    if mode not in MODES:
        raise UserError(f"rounds={mode!r} is unknown. Allowed: {', '.join(MODES)}.")
    return mode


def can_be_captured(rows: Rows, sampler: Sampler) -> bool:
    """On CUDA, unless the caller's own Python takes part: HF processors, or a sampler that keeps what it sees."""
    own_python = getattr(sampler.transforms, "processors", ()) or type(sampler) is not Sampler
    return rows.device.type == "cuda" and not own_python
