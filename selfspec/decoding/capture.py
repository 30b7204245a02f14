"""Recording functions as CUDA graphs, so that what they need stays where it is and a failure leaves nothing behind.

A graph replays kernels on bare addresses. From that follows all that is done here:

- Whatever a graph reads is kept alive with it (`Inputs`), also if its owner has replaced it since: a table that was
  made anew for a longer cache, say.
- The functions first run twice as they are, on the stream that records later: what is made once (tables, kernels, the
  workspaces of cuBLAS) is made outside the graphs' own memory.
- The second of these runs is a dress rehearsal, in which reading the host is an error. Within a capture the driver
  would break off, and torch would go on as if it was still recording: on the wrong stream, with an allocator that
  refuses the next capture. A rehearsal that fails costs nothing.

Cost: two runs and one capture per set of functions, about a tenth of a second for a large model.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from selfspec.errors import UserError

Part = Callable[[], None]
Read = Callable[[], list[list[float]]]


class NotCapturable(UserError):
    """The functions read the host, or copy something to the device: they have to be launched one by one."""


class Graph(Protocol):
    def replay(self) -> None: ...


@dataclass
class Recording:
    """Graphs to be replayed in order, and the memory that they read."""

    graphs: list[Graph]
    inputs: list[torch.UntypedStorage] = field(default_factory=list)


class Recorder(Protocol):
    """What `GraphedRounds` asks of a device; the tests have one for the CPU."""

    def record(self, parts: Sequence[Part]) -> Recording:
        """One graph per part. All parts are run three times; NotCapturable if they cannot be recorded."""

    def to_host(self, report: Tensor) -> Read:
        """Start copying; calling the result waits for the copy and returns it."""


class CudaRecorder:
    """Graphs that share one pool of memory: they never run side by side, and nothing in it outlives a round."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, parts: Sequence[Part]) -> Recording:
        with torch.cuda.device(self.device):
            stream = capture_stream(torch.cuda.current_device())
            inputs = self._rehearse(parts, stream)
            try:
                return Recording([self._capture(part, stream) for part in parts], inputs)
            except RuntimeError as error:
                if "captur" not in str(error):  # "operation not permitted when stream is capturing"
                    raise
                raise NotCapturable(f"A round cannot be a CUDA graph: {error} Use rounds='eager'.") from error

    def to_host(self, report: Tensor) -> Read:
        """The next replay, which overwrites the report, is queued behind the copy."""
        pinned = torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
        pinned.copy_(report, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(report.device))

        def read() -> list[list[float]]:
            arrived.synchronize()
            return pinned.tolist()

        return read

    def _rehearse(self, parts: Sequence[Part], stream: torch.cuda.Stream) -> list[torch.UntypedStorage]:
        caller, inputs = torch.cuda.current_stream(), Inputs()
        stream.wait_stream(caller)
        try:
            with torch.cuda.stream(stream):
                for part in parts:
                    part()
                with host_reads_forbidden(), inputs:
                    for part in parts:
                        part()
        finally:
            caller.wait_stream(stream)  # none of it may still be running when the caller goes on
        return inputs.storages

    def _capture(self, part: Part, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):  # torch.cuda.graph does not go back to the caller's if it ends in an error
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                    part()
            except BaseException:
                self._abandon(stream)
                raise
        return graph

    def _abandon(self, stream: torch.cuda.Stream) -> None:
        """A capture that the driver broke off stays open for torch's allocator, which then refuses the next one. Its
        random generator refuses to draw, too, until a capture has ended as it should, if only an empty one.
        """
        broken, self._pool = self._pool, torch.cuda.graph_pool_handle()
        with suppress(RuntimeError, AttributeError):  # "not currently recording": it was closed properly
            torch._C._cuda_endAllocateToPool(self.device.index, broken)
            torch._C._cuda_releasePool(self.device.index, broken)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the graph is empty
                with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
                    pass


class Inputs(TorchDispatchMode):
    """Holds the memory that operators read or write and that none of them has made."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[torch.UntypedStorage] = []
        self._known: set[int] = set()  # addresses that are held, or that an operator in here has made

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_in((args, tuple(kwargs.values()))):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._known:
                self._known.add(storage.data_ptr())
                self.storages.append(storage)
        out = func(*args, **kwargs)
        self._known.update(tensor.untyped_storage().data_ptr() for tensor in tensors_in(out))
        return out


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors among the arguments or the results of an operator."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)


@contextmanager
def host_reads_forbidden() -> Iterator[None]:
    """NotCapturable for whatever makes the host wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        raise NotCapturable(
            "A round reads the host, or copies something from it to the device, so it cannot be a CUDA graph. Use "
            "rounds='eager', or make it work on the device alone."
        ) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


@functools.cache
def capture_stream(_device_index: int) -> torch.cuda.Stream:
    """One per device, the current one: cuBLAS keeps a workspace for every stream it has ever run on."""
    return torch.cuda.Stream()
