"""Always draft the same number of tokens."""

from __future__ import annotations

from dataclasses import dataclass

from selfspec.errors import UserError
from selfspec.lookahead.plan import Plan


@dataclass
class Fixed:
    """K = `num_drafted` in every round."""

    num_drafted: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.num_drafted, int) or isinstance(self.num_drafted, bool) or self.num_drafted < 1:
            raise UserError(
                f"num_drafted={self.num_drafted!r} is not possible: the lookahead is a whole number, 1 or more."
            )

    @property
    def max_drafted(self) -> int:
        return self.num_drafted

    def choose(self) -> Plan:
        return Plan(self.num_drafted)
