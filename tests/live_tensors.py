"""Counts tensor memory exactly: what lies in objects, and the peak of what a block of code allocates."""

from __future__ import annotations

import types
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class PeakOfNewTensors(TorchDispatchMode):
    """`with PeakOfNewTensors() as peak: ...`: `peak.nbytes` is the most that tensors made inside took at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = self._now = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = set()
        if func is not torch.ops.aten.lift_fresh.default:  # torch.from_numpy: memory that numpy has just made
            given = {one.untyped_storage()._cdata for one in tree_iter((args, kwargs)) if _has_storage(one)}
        for one in tree_iter(out):
            if _has_storage(one):
                storage = one.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._live:
                    self._live[storage._cdata] = storage.nbytes()
                    self._now += storage.nbytes()
                    self.nbytes = max(self.nbytes, self._now)
                    weakref.finalize(storage, self._dropped, storage._cdata)
        return out

    def _dropped(self, key: int) -> None:
        self._now -= self._live.pop(key)


def _has_storage(one: object) -> bool:
    return isinstance(one, torch.Tensor) and not one.is_mkldnn


def bytes_in(*objects: object, without: object = None) -> int:
    """Bytes of all tensors reachable from these objects, each storage once; not those reachable from `without`."""
    excluded = _storages([without]) if without is not None else {}
    return sum(nbytes for key, nbytes in _storages(objects).items() if key not in excluded)


def _storages(objects: Any) -> dict[int, int]:
    found: dict[int, int] = {}
    waiting, seen = list(objects), set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type | str | bytes | int | float):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor) and one.is_mkldnn:  # packed, and shows no storage
            found[id(one)] = one.numel() * one.dtype.itemsize
        elif isinstance(one, torch.Tensor):
            found[one.untyped_storage()._cdata] = one.untyped_storage().nbytes()
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple | set):
            waiting += one
        elif isinstance(one, types.FunctionType):
            waiting += [cell.cell_contents for cell in one.__closure__ or ()]
        elif type(one).__module__.startswith(("selfspec", "torch.nn", "transformers", "test_")):
            waiting += getattr(one, "__dict__", {}).values()
    return found
