"""transformers' schedule: two more after a round in which everything was accepted, one less after any other.

`num_assistant_tokens_schedule="heuristic"` in transformers' assisted generation, which decodes one row; with several
rows here, all of them have to have accepted everything for the draft to grow.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from selfspec.errors import UserError
from selfspec.lookahead.confidence import check_max_drafted
from selfspec.lookahead.plan import Plan, RoundOutcome


@dataclass
class Heuristic:
    """initial: K of the first round. max_drafted: the most that is drafted (transformers has no limit)."""

    initial: int = 5
    max_drafted: int = 16
    _num_drafted: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_max_drafted(self.max_drafted)
        if isinstance(self.initial, bool | float) or not 1 <= self.initial <= self.max_drafted:
            raise UserError(
                f"initial={self.initial}, max_drafted={self.max_drafted}: allowed are whole numbers, "
                "1 <= initial <= max_drafted."
            )
        self._num_drafted = self.initial

    def choose(self) -> Plan:
        return Plan(self._num_drafted)

    def observe(self, outcome: RoundOutcome) -> None:
        tested = [(d, a) for d, a in zip(outcome.num_drafted, outcome.num_accepted, strict=True) if d > 0]
        if not tested:
            return
        if all(accepted == drafted for drafted, accepted in tested):
            self._num_drafted = min(self._num_drafted + 2, self.max_drafted)
        else:
            self._num_drafted = max(self._num_drafted - 1, 1)
