"""Time by phase within a round, on a monotonic clock; on CUDA each mark waits for the device (unless `wait` is off)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """`start()`, then `mark(phase)` at the end of each stretch of a phase; `seconds[phase]` is the last round's sum."""

    def __init__(self, device: torch.device, wait: bool = True) -> None:
        self._device, self._wait = device, wait
        self.seconds: dict[str, float] = {}
        self._last = 0.0
        self._paused_s = 0.0

    def now(self) -> float:
        if self._wait:
            self._settle()
        return time.perf_counter() - self._paused_s

    def settled(self) -> float:
        """Now, once the device has done all it was given, also where the marks do not wait."""
        self._settle()
        return time.perf_counter() - self._paused_s

    def start(self) -> float:
        self.seconds = {}
        self._last = self.now()
        return self._last

    def mark(self, phase: str) -> float:
        now = self.now()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now
        return now

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside takes no time: it is paid once per shape (a capture), not per round."""
        begin_s = self.settled()
        try:
            yield
        finally:
            self._paused_s += self.settled() - begin_s

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
