"""CUDA graphs without CUDA: the operators of a function are recorded with the very tensors they ran on, and replayed.

What a real graph would get wrong goes wrong here too: a Python number read at capture time stays as it was, memory that
was replaced since is not seen, and reading the host is refused. What is not checked is what torch and CUDA do
themselves: streams, memory pools, launches.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from selfspec.decoding.capture import Inputs, NotCapturable, Recording, tensors_in

PYTHON_READS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "numpy", "cpu")
UPLOADS = ("tensor", "as_tensor", "from_numpy")  # on CUDA a copy from memory that is not pinned: the host waits
HOST_OPERATORS = {
    "aten._local_scalar_dense.default",
    "aten.nonzero.default",
    "aten.is_nonzero.default",
    "aten.equal.default",
    "aten.masked_select.default",
    "aten.unique_dim.default",
    "aten._unique2.default",
}


@contextmanager
def host_reads_refused():
    """What `capture.host_reads_forbidden` is on a GPU, as far as Python shows it."""

    def refuse(*args, **kwargs):
        raise NotCapturable("something was read on the host, or copied from it")

    with pytest.MonkeyPatch.context() as patch:
        for name in PYTHON_READS:
            patch.setattr(torch.Tensor, name, refuse)
        for name in UPLOADS:
            patch.setattr(torch, name, refuse)
        yield


class Tape(TorchDispatchMode):
    """Records while it is active; `replay` runs the same operators on the same memory."""

    def __init__(self):
        super().__init__()
        self.steps = []
        self.numbers = []  # made of a Python number for `tensor[...] = number`: fills, or is copied from the host

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        masks = [t for t in tensors_in(args[1:2]) if t.dtype == torch.bool] if "aten.index" in str(func) else []
        if str(func) in HOST_OPERATORS or masks:  # x[mask] counts on the host
            raise NotCapturable(f"{func} cannot be captured")
        if str(func) == "aten.copy_.default" and any(args[1] is number for number in self.numbers):
            raise NotCapturable("`tensor[i] = number` is a copy from the host where a single element is written")
        out = func(*args, **(kwargs or {}))
        if str(func) == "aten.lift_fresh.default":
            self.numbers.append(out)
        self.steps.append((func, args, kwargs or {}, out))
        return out

    @torch.inference_mode()
    def replay(self):
        for func, args, kwargs, out in self.steps:
            again = func(*args, **kwargs)
            for old, new in zip(tensors_in(out), tensors_in(again), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():  # else a view, or in place
                    old.copy_(new)

    def external(self):
        """Addresses of the memory that is used and was not made by a recorded operator."""
        made, external = set(), set()
        for func, args, kwargs, out in self.steps:
            if str(func) == "aten.lift_fresh.default":
                continue
            for tensor in tensors_in((args, tuple(kwargs.values()))):
                if any(tensor is number for number in self.numbers):
                    continue
                address = tensor.untyped_storage().data_ptr()
                if address not in made:
                    external.add(address)
            made |= {tensor.untyped_storage().data_ptr() for tensor in tensors_in(out)} - external
        return external - {0}


class TapeRecorder:
    """`capture.CudaRecorder` for the CPU."""

    def __init__(self, device):
        self.device = device
        self.recordings = []

    def record(self, parts):
        inputs, tapes = Inputs(), []
        for part in parts:
            part()
        with host_reads_refused(), inputs:
            for part in parts:
                part()
        for part in parts:
            tapes.append(Tape())
            with host_reads_refused(), tapes[-1]:
                part()
        self.recordings.append(Recording(tapes, inputs.storages))
        return self.recordings[-1]

    def to_host(self, report):
        return report.clone().tolist
