"""Time by phase within a round, on a monotonic clock; on CUDA each mark waits for the device (unless `wait` is off)."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """`start()`, then `mark(phase)` at the end of each phase; `seconds[phase]` is the last round's time."""

    def __init__(self, device: torch.device, wait: bool = True) -> None:
        self._synchronize = torch.cuda.synchronize if wait and device.type == "cuda" else None
        self.seconds: dict[str, float] = {}
        self._last = 0.0

    def now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return time.perf_counter()

    def start(self) -> float:
        self.seconds = {}
        self._last = self.now()
        return self._last

    def mark(self, phase: str) -> float:
        now = self.now()
        self.seconds[phase] = now - self._last
        self._last = now
        return now
