"""Memory of one method, on the device and on the host, although one process holds all methods at once.

Every drafter's weights and cache stay allocated while another method runs, so a plain peak would be the same for all.
What is reported is what the method needs by itself:

    the target alone  +  what grew when the method was built and first run  +  the rise while it generates

On the host these are resident bytes of the process (Python and torch included), good to a few ten megabytes; on CUDA
they are torch's allocations, exact. Linux lets a process reset its high-water mark; elsewhere the host's part is None.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

RESET_HIGH_WATER_MARK = "5"  # proc(5), /proc/pid/clear_refs


@dataclass
class Memory:
    """Bytes; None where they cannot be measured."""

    device_bytes: int | None = None
    host_bytes: int | None = None

    def __add__(self, other: Memory) -> Memory:
        return Memory(_add(self.device_bytes, other.device_bytes, 1), _add(self.host_bytes, other.host_bytes, 1))

    def __sub__(self, other: Memory) -> Memory:
        return Memory(_add(self.device_bytes, other.device_bytes, -1), _add(self.host_bytes, other.host_bytes, -1))


def _add(left: int | None, right: int | None, sign: int) -> int | None:
    return None if left is None or right is None else left + sign * right


def in_use(device: torch.device) -> Memory:
    """What is allocated now."""
    on_device = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
    return Memory(on_device, _status("VmRSS"))


@contextmanager
def growth(device: torch.device) -> Iterator[Memory]:
    """`with growth(device) as grown: ...`: how much more is allocated afterwards."""
    grown, before = Memory(), in_use(device)
    yield grown
    after = in_use(device) - before
    grown.device_bytes, grown.host_bytes = after.device_bytes, after.host_bytes


@contextmanager
def rise(device: torch.device) -> Iterator[Memory]:
    """`with rise(device) as risen: ...`: how far the peak within the block lies above what was allocated before it."""
    risen, can_reset_host = Memory(), _reset_host_peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    before = in_use(device)
    yield risen
    if before.device_bytes is not None:
        risen.device_bytes = torch.cuda.max_memory_allocated(device) - before.device_bytes
    if can_reset_host and before.host_bytes is not None:
        risen.host_bytes = max(0, (_status("VmHWM") or 0) - before.host_bytes)


def _reset_host_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text(RESET_HIGH_WATER_MARK)
    except OSError:
        return False
    return True


def _status(name: str) -> int | None:
    """A line of /proc/self/status, in bytes; None where there is no such file."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
