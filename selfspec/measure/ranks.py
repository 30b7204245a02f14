"""One experiment in several processes that share a target (`selfspec.target.tensor_parallel`): only the first is seen.

    torchrun --nproc-per-node=2 experiments/compare.py ... runtime.tensor_parallel=2

Every rank runs the whole program, since every rank is needed for every pass of the target. The first one prints,
tracks and writes the run directory; the others go through the same steps on a copy of it that is thrown away, so that
all agree on what is done already and what is left, and print nothing. If one fails, it says why, once, and torchrun
ends the others.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from selfspec.config import RuntimeConfig
from selfspec.errors import UserError
from selfspec.target.tensor_parallel import join

FAILURES = "selfspec/failures"  # counted in torchrun's own store, which outlives any rank


@contextmanager
def in_step(runtime: RuntimeConfig) -> Iterator[bool]:
    """The ranks of one run, or this process alone; yields whether this is the one that is seen. UserError where
    torchrun started another number than `runtime.tensor_parallel`.
    """
    if runtime.tensor_parallel == 1:
        refuse_torchrun()
        yield True
        return
    join(runtime.tensor_parallel)
    atexit.unregister(dist.destroy_process_group)
    first = dist.get_rank() == 0
    if first:
        yield True
    else:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            yield False
    # Not after a failure: the others would be waited for in vain. And not before the process ends: a group that is made
    # anew has the old one's name in torchrun's store, and finds its addresses there.
    dist.barrier()
    atexit.register(dist.destroy_process_group)


def refuse_torchrun() -> None:
    """UserError where torchrun started several processes that know nothing of each other."""
    if (started := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise UserError(
            f"torchrun started {started} processes, which would measure the same thing {started} times into one "
            f"folder. Give runtime.tensor_parallel={started} for a target that they share, or leave torchrun out."
        )


@contextmanager
def seen_by_first(folder: Path, first: bool) -> Iterator[Path]:
    """`folder` for the first rank; for the others a copy of it as it is now, gone afterwards."""
    if not dist.is_initialized():
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="selfspec-rank-") as scratch:
        own = folder if first else Path(scratch) / folder.name
        if not first and folder.exists():
            shutil.copytree(folder, own)
        dist.barrier()  # the first one writes only when all have their copy
        yield own


def said_once(message: str) -> str | int:
    """What `sys.exit` is given: the message, or 1 alone if another rank has failed before this one."""
    return 1 if failed_elsewhere() else message


def failed_elsewhere() -> bool:
    """Whether another rank has failed before; counts this process as failed too."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "MASTER_PORT" not in os.environ:
        return False
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=5))
        return store.add(FAILURES, 1) > 1
    except dist.DistError as error:  # nobody to ask: better said twice than not at all
        print(f"warning: torchrun's store does not answer: {error}", file=sys.stderr)
        return False
