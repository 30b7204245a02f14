"""Sections of a long measurement that cannot spoil one another: an error is recorded beside what was found before it,
and one that takes too long is cut off. Hours on a rented machine end with a result, whatever fails.
"""

from __future__ import annotations

import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class OutOfTime(BaseException):
    """A section took longer than it may. Not an Exception: no library's `except Exception` may swallow it."""


@contextmanager
def at_most(seconds: float) -> Iterator[Callable[[], float]]:
    """Raises OutOfTime inside the block when the time is over; yields how many seconds are left to begin something.

    A tenth is kept back, for what has begun by then. The end comes by an alarm, which Python handles between two of its
    own steps; other than in the main thread there is none.
    """
    end = time.monotonic() + 0.9 * seconds

    def left() -> float:
        return end - time.monotonic()

    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise OutOfTime(f"longer than {seconds:.0f} s")

    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield left
        return
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield left
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attempt(result: dict[str, Any], name: str, measure: Callable[[dict[str, Any]], None]) -> None:
    """`measure(result[name])` fills in what it finds; an error is kept beside what was found before it."""
    part = result.setdefault(name, {})
    try:
        measure(part)
    except OutOfTime:
        part["error"] = "out of time"
        raise
    except Exception as error:  # recorded, shown and counted at the end: one failure must not cost the GPU's time
        part["error"] = one_line(error)
        part["traceback"] = traceback.format_exc()


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def errors_in(result: dict[str, Any], path: str = "") -> list[str]:
    """Every error in nested results, with where it happened."""
    found = [f"{path}: {result['error']}"] if "error" in result else []
    for name, part in result.items():
        if isinstance(part, dict):
            found += errors_in(part, f"{path}/{name}".strip("/"))
    return found
