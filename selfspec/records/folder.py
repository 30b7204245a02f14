"""A folder that one process writes: that it can be written at all, and that no other process writes it too."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

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


def open_lock(folder: Path) -> BinaryIO:
    """The file to lock `folder` by, which is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    return open(folder / ".lock", "ab")


def take_lock(folder: Path, otherwise: str) -> BinaryIO:
    """The folder is this process's to write until the file is closed. UserError where another has it; `otherwise`: what
    to do but wait.
    """
    file = open_lock(folder)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError(
            f"{folder} is being written by another process; wait for it, stop it, or {otherwise}."
        ) from None
    return file
