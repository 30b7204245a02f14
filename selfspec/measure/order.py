"""The order in which things that are compared take their turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def balanced(compared: Sequence[T], turn: int) -> list[T]:
    """All of them in the order of one turn: in as many turns as there are of them, twice as many where their number is
    odd, each is equally often in every place and equally often right after each other one (Williams 1949). In a mere
    rotation each would always follow the same one, and inherit whatever that leaves behind.
    """
    number = len(compared)
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(number)]  # 0, 1, -1, 2, -2, ...
    order = [compared[(step + turn) % number] for step in zigzag]
    return order[::-1] if number % 2 and turn % 2 else order
