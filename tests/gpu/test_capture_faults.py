"""What `CudaRecorder` asks of torch, and in which order, with a stand-in for `torch.cuda`: above all when things fail.

The stand-in does what torch does where it matters: a capture that CUDA breaks off raises in `__exit__` before the
caller's stream is current again, and leaves the allocator believing that it still records.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from selfspec.decoding import capture
from selfspec.decoding.capture import CudaRecorder, NotCapturable

BROKEN_OFF = "CUDA error: operation failed due to a previous error during capture"


class FakeCuda:
    """Streams, one allocator, captures; `log` holds what happened."""

    def __init__(self):
        self.current, self.log, self.pools, self.recording, self.mode = "caller", [], 0, set(), 0
        self.broken = False
        self.draws = True  # whether the random generator can be used outside a capture

    def install(self, patch):
        for name in ("current_stream", "stream", "graph", "device", "graph_pool_handle", "CUDAGraph"):
            patch.setattr(torch.cuda, name, getattr(self, name))
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "get_sync_debug_mode", lambda: self.mode)
        patch.setattr(torch.cuda, "set_sync_debug_mode", self.set_mode)
        patch.setattr(capture, "capture_stream", lambda index: FakeStream(self, "side"))
        patch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_allocate, raising=False)
        patch.setattr(torch._C, "_cuda_releasePool", lambda *a: self.log.append("release pool"), raising=False)

    def CUDAGraph(self):
        return "graph"

    def graph_pool_handle(self):
        self.pools += 1
        return self.pools

    def set_mode(self, mode):
        self.mode = mode

    def current_stream(self):
        return FakeStream(self, self.current)

    @contextmanager
    def device(self, device):
        yield

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    def graph(self, graph, pool=None, *, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        return FakeCapture(self, pool or self.graph_pool_handle(), stream)

    def end_allocate(self, device, pool):
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool)

    def wait_for_the_device(self):
        """What `.item()` does."""
        if self.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.recording:
            self.broken = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


class FakeStream:
    def __init__(self, cuda, name):
        self.cuda, self.name = cuda, name

    def wait_stream(self, other):
        self.cuda.log.append(f"{self.name} waits for {other.name}")


class FakeCapture:
    def __init__(self, cuda, pool, stream):
        self.cuda, self.pool, self.stream_ = cuda, pool, stream

    def __enter__(self):
        assert not self.cuda.recording, "captures_underway.empty() INTERNAL ASSERT FAILED"
        self.before, self.cuda.current = self.cuda.current, self.stream_.name
        self.cuda.recording.add(self.pool)
        self.cuda.draws = False
        self.cuda.log.append("capture")

    def __exit__(self, *error):
        if self.cuda.broken:
            self.cuda.broken = False
            raise RuntimeError(BROKEN_OFF)
        self.cuda.recording.remove(self.pool)
        self.cuda.draws = True
        self.cuda.current = self.before


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


def recorder():
    return CudaRecorder(torch.device("cuda", 0))


def test_parts_run_twice_on_the_side_stream_and_are_then_captured_in_turn(cuda):
    ran = []
    recording = recorder().record(
        [lambda: ran.append(("a", cuda.current, cuda.mode)), lambda: ran.append(("b", cuda.current, cuda.mode))]
    )
    assert ran == [(name, "side", mode) for mode in (0, "error", 0) for name in "ab"]
    assert cuda.log == ["side waits for caller", "caller waits for side", "capture", "capture"]
    assert len(recording.graphs) == 2 and cuda.current == "caller" and cuda.mode == 0


def test_reading_the_host_is_found_before_the_capture(cuda):
    with pytest.raises(NotCapturable, match="reads the host"):
        recorder().record([cuda.wait_for_the_device])
    assert "capture" not in cuda.log
    assert cuda.current == "caller" and cuda.mode == 0


@pytest.mark.parametrize("call", [1, 2, 3])
def test_an_error_in_any_run_leaves_stream_allocator_and_mode_as_they_were(cuda, call):
    calls = []

    def part():
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt

    one = recorder()
    with pytest.raises(KeyboardInterrupt):
        one.record([part])
    assert cuda.log[-1 if call < 3 else -2] == "caller waits for side", "nothing may still be running"
    assert cuda.current == "caller" and cuda.mode == 0 and not cuda.recording and cuda.draws
    one.record([part])


def test_a_capture_that_cuda_breaks_off_leaves_stream_and_allocator_as_they_were(cuda):
    one, pool = recorder(), cuda.pools
    waits = [True]

    def part():
        if cuda.recording and waits[0]:  # only now: no rehearsal can find this out
            cuda.wait_for_the_device()

    with pytest.raises(NotCapturable, match="previous error during capture"):
        one.record([part])
    assert cuda.current == "caller" and not cuda.recording
    assert cuda.log[-2:] == ["release pool", "capture"] and one._pool != pool
    assert cuda.draws, "a capture that ended well gives the random generator back"
    waits[0] = False
    one.record([part])


def test_other_errors_while_capturing_are_what_they_are(cuda):
    def part():
        if cuda.recording:
            raise RuntimeError("CUDA out of memory")

    with pytest.raises(RuntimeError, match="out of memory") as caught:
        recorder().record([part])
    assert not isinstance(caught.value, NotCapturable)
