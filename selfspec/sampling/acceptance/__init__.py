"""Acceptance rules, one file each, and the one place that picks among them by name."""

from __future__ import annotations

from selfspec.errors import UserError
from selfspec.sampling.acceptance.block import Block
from selfspec.sampling.acceptance.coupled import Coupled
from selfspec.sampling.acceptance.greedy import Greedy
from selfspec.sampling.acceptance.rejection import Rejection
from selfspec.sampling.acceptance.typical import Typical
from selfspec.sampling.acceptance.verdict import Rule, Verdict
from selfspec.sampling.settings import Sampling

__all__ = ["Rule", "Verdict", "build_rule"]

SAMPLED_RULES: dict[str, type[Rule]] = {"rejection": Rejection, "coupled": Coupled, "block": Block, "typical": Typical}


def build_rule(acceptance: str | Rule, sampling: Sampling) -> Rule:
    """The rule for these settings. At temperature 0 p is one-hot and every rule is greedy acceptance.

    Raises UserError on an unknown name, and on "greedy" when sampling, which would not keep p.
    """
    if not isinstance(acceptance, str):
        if not callable(getattr(acceptance, "accept", None)):
            raise UserError(f"acceptance={acceptance!r} is neither a name nor an acceptance rule.")
        return acceptance  # the caller's own
    if acceptance not in ("auto", "greedy", *SAMPLED_RULES):
        raise UserError(f"acceptance={acceptance!r} is not one of auto, greedy, {', '.join(SAMPLED_RULES)}.")
    if sampling.greedy:
        return Greedy()
    if acceptance == "greedy":
        raise UserError(
            f"acceptance='greedy' with temperature={sampling.temperature} would not keep the target's distribution. "
            "Use temperature=0, or acceptance='rejection'."
        )
    return SAMPLED_RULES["rejection" if acceptance == "auto" else acceptance]()
