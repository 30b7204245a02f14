"""Training in several processes: each takes its share of a step's batches, and the gradients are summed.

`torchrun --nproc-per-node=N experiments/train.py ...` starts them; a plain `python` is the case N = 1, through the same
code. The batches of a step are the same ones whatever N is, so N changes the order of a sum and nothing else: process r
takes the batches r, r + N, r + 2N, ... of `train.accumulate`. One all-reduce a step, of all gradients in one buffer.
Only the first process writes, validates and reports; what it decides (stop, or go on) the others are told.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from selfspec.errors import UserError

PATIENCE = datetime.timedelta(hours=12)  # the first process may compute the target's distributions for hours


@dataclass(frozen=True)
class Processes:
    """Which of how many processes this one is. Without a process group: the only one."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def shares(self, batches: int) -> range:
        """This process's share of a step's batches. UserError when they cannot be shared evenly."""
        if batches % self.count:
            raise UserError(
                f"train.accumulate={batches} batches a step cannot be shared by {self.count} processes. Give a "
                f"multiple of {self.count}: with batch_rows smaller by as much, a step sees the same text."
            )
        return range(self.rank, batches, self.count)

    def begin_alike(self, parameters: Sequence[Tensor]) -> None:
        """Every process gets the first one's weights: what computed them may differ in its last bit elsewhere."""
        for parameter in parameters if self.count > 1 else ():
            dist.broadcast(parameter.data, src=0)

    def sum_number(self, number: int, device: torch.device) -> int:
        if self.count == 1:
            return number
        total = torch.tensor(number, device=device)
        dist.all_reduce(total)
        return int(total)

    def sum_gradients(self, parameters: Sequence[Tensor], loss: Tensor) -> Tensor:
        """Add up the gradients in place, and the loss, which is returned. No gradient anywhere stays no gradient."""
        if self.count == 1:
            return loss
        there = torch.tensor([float(p.grad is not None) for p in parameters], device=loss.device)
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        buffer = torch.cat([*(part.flatten().float() for part in parts), there, loss.float().reshape(1)])
        dist.all_reduce(buffer)
        sizes = [part.numel() for part in parts]
        *sums, there, total = buffer.split([*sizes, len(parameters), 1])
        for parameter, part, summed, anywhere in zip(parameters, parts, sums, there.tolist(), strict=True):
            parameter.grad = summed.view_as(part).to(part.dtype) if anywhere else None
        return total[0]

    def decided_by_first(self, decision: bool, device: torch.device) -> bool:
        if self.count == 1:
            return decision
        told = torch.tensor(int(decision), device=device)
        dist.broadcast(told, src=0)
        return bool(told)

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """The first process goes through the block, then the others do, and find what it left on the disk."""
        if self.count > 1 and not self.first:
            dist.barrier()
        yield
        if self.count > 1 and self.first:
            dist.barrier()


@contextmanager
def joined(device: str) -> Iterator[Processes]:
    """The processes that torchrun started (gloo on a CPU, NCCL with one GPU each), or this one alone. `device` as
    `load_target` takes it.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Processes()
        return
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=PATIENCE)
    try:
        yield Processes(dist.get_rank(), count)
    finally:
        dist.destroy_process_group()
