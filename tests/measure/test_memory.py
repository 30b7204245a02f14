"""What one method needs is told apart from what others keep allocated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from selfspec.measure.memory import Memory, growth, in_use, rise

CPU = torch.device("cpu")
MEGABYTES_64 = 64 * 2**20
needs_proc = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux can reset a peak")


@needs_proc
def test_a_peak_within_the_block_is_seen_and_an_earlier_one_is_not() -> None:
    torch.ones(2 * MEGABYTES_64, dtype=torch.uint8)  # freed at once: an earlier, higher peak
    with rise(CPU) as small:
        pass
    with rise(CPU) as large:
        torch.ones(MEGABYTES_64, dtype=torch.uint8)
    assert small.host_bytes is not None and large.host_bytes is not None
    assert small.host_bytes < MEGABYTES_64 / 4
    assert 0.9 * MEGABYTES_64 < large.host_bytes < 1.5 * MEGABYTES_64


@needs_proc
def test_growth_counts_what_stays() -> None:
    with growth(CPU) as grown:
        kept = torch.ones(MEGABYTES_64, dtype=torch.uint8)
        torch.ones(MEGABYTES_64, dtype=torch.uint8)
    assert grown.host_bytes is not None
    assert 0.9 * MEGABYTES_64 < grown.host_bytes < 1.5 * MEGABYTES_64
    assert kept.numel() == MEGABYTES_64


def test_what_cannot_be_measured_stays_unknown() -> None:
    assert Memory(None, 5) + Memory(3, 4) == Memory(None, 9)
    assert Memory(7, None) - Memory(3, 4) == Memory(4, None)
    assert in_use(CPU).device_bytes is None


@pytest.mark.gpu
def test_device_peaks_are_exact() -> None:
    device = torch.device("cuda")
    with rise(device) as risen:
        torch.ones(MEGABYTES_64, dtype=torch.uint8, device=device)
    assert risen.device_bytes == MEGABYTES_64
