"""Every drafter with every lookahead, as one block of a config instead of a page of entries.

    grid:
      learned:                      # any name; several blocks, where not every drafter goes with every lookahead
        drafters: {eagle3: {kind: eagle3, checkpoint: ...}, medusa: {kind: medusa, checkpoint: ...}}
        lookaheads: {k1: 1, k2: 2, gain: {kind: expected_gain, max_drafted: 5}}

becomes the drafters eagle3_k1, eagle3_k2, eagle3_gain, medusa_k1, ... of the comparison, named and hashed as if they
had been written out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from selfspec.errors import UserError

KEYS = ("drafters", "lookaheads")
FORM = "A block of the grid is {drafters: {label: drafter}, lookaheads: {label: lookahead}}, neither empty"


def expand(grid: Mapping[str, Any]) -> dict[str, Any]:
    """`<drafter>_<lookahead>` -> the drafter with that lookahead. A block that is null is left out.

    Raises UserError for a block of another form, a drafter that has a lookahead already, and a label made twice.
    """
    found: dict[str, Any] = {}
    for name, block in grid.items():
        if block is None:
            continue
        if not isinstance(block, Mapping) or set(block) != set(KEYS):
            keys = ", ".join(map(str, block)) if isinstance(block, Mapping) else repr(block)
            raise UserError(f"grid.{name} holds {keys or 'nothing'}. {FORM}.")
        drafters, lookaheads = (block[key] for key in KEYS)
        if not all(isinstance(part, Mapping) and part for part in (drafters, lookaheads)):
            raise UserError(f"grid.{name} pairs nothing. {FORM}.")
        for label, drafter in drafters.items():
            if not isinstance(drafter, Mapping):
                raise UserError(f"grid.{name}.drafters.{label}={drafter!r} is no drafter. {FORM}.")
            if drafter.get("lookahead") is not None:
                raise UserError(f"grid.{name}.drafters.{label} has a lookahead of its own; the grid gives it one.")
            for suffix, lookahead in lookaheads.items():
                if (method := f"{label}_{suffix}") in found:
                    raise UserError(
                        f"The grid makes the drafter {method!r} twice; name one of its blocks' labels anew."
                    )
                found[method] = {**drafter, "lookahead": lookahead}
    return found
