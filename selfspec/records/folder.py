"""A folder that one process writes: that it can be written at all, and that no other process writes it too.

A lock is the kernel's (flock), not the file's presence: it ends with the last process that has it open, however that
ends, and a process that is started with it has it too. The file tells whom to ask: who took the lock last.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path

from selfspec.errors import UserError


@contextmanager
def writable(folder: Path, option: str) -> Iterator[None]:
    """What this block writes goes to `folder`, which `option` chose. UserError where it cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write to {folder} ({error.strerror}); choose another place with {option}=..."
        ) from error


def take_lock(folder: Path, otherwise: str, name: str = "") -> FileIO:
    """The folder, or what goes by `name` in it, is this process's to write until the file is closed. UserError where
    another has it, which is named; `otherwise`: what to do but wait.
    """

    def refuse(holder: str) -> None:
        raise UserError(f"{folder / name} is being written by {holder}; wait for it, stop it, or {otherwise}.")

    return _lock(folder, name, refuse)


def wait_for_lock(folder: Path, waiting: Callable[[str], None]) -> FileIO:
    """The same as soon as no other process has it; `waiting` is told who does before it is waited for."""
    return _lock(folder, "", waiting)


def _lock(folder: Path, name: str, when_held: Callable[[str], None]) -> FileIO:
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / f"{name}.lock", "a+b", buffering=0)  # noqa: SIM115 - lives as long as the lock
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            when_held(file.read().decode(errors="replace").strip() or "another process")
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(f"{_me()}\n".encode())
    except BaseException:
        file.close()
        raise
    return file


def _me() -> str:
    """Without the command line, which may hold what no file should."""
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"{Path(sys.argv[0]).name or 'python'} (process {os.getpid()} on {socket.gethostname()}, since {now})"
