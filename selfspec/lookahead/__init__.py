"""How many tokens to draft in a round: one file per policy, one protocol."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from selfspec.config import allowed, conf_names, load_conf
from selfspec.errors import UserError
from selfspec.lookahead.bandit import Bandit
from selfspec.lookahead.confidence import AdaptiveThreshold, Confidence
from selfspec.lookahead.dynamic_tree import DynamicTree
from selfspec.lookahead.entropy import Entropy
from selfspec.lookahead.expected_gain import ExpectedGain
from selfspec.lookahead.fixed import Fixed
from selfspec.lookahead.heuristic import Heuristic
from selfspec.lookahead.plan import Plan, RoundOutcome, draft_probabilities
from selfspec.lookahead.tree import Tree

__all__ = [
    "POLICIES",
    "Fixed",
    "Lookahead",
    "Observing",
    "Plan",
    "RoundOutcome",
    "Stopping",
    "build_lookahead",
    "draft_probabilities",
]

POLICIES: dict[str, type] = {
    "fixed": Fixed,
    "heuristic": Heuristic,
    "confidence": Confidence,
    "adaptive_threshold": AdaptiveThreshold,
    "entropy": Entropy,
    "expected_gain": ExpectedGain,
    "bandit": Bandit,
    "tree": Tree,
    "dynamic_tree": DynamicTree,
}


class Lookahead(Protocol):
    """Decides before each round how much to draft. It may know what earlier rounds brought and what they cost, and
    nothing of the coins that accept: then any choice leaves the output's distribution as it is.
    """

    @property
    def max_drafted(self) -> int:
        """The most it will ever ask for: the cache and the shapes are sized by it."""

    def choose(self) -> Plan:
        """The next round: at most `max_drafted` tokens, 0 for none."""


@runtime_checkable
class Observing(Protocol):
    """A policy that learns from what rounds brought."""

    def observe(self, outcome: RoundOutcome) -> None:
        """Called once per round, in order."""


@runtime_checkable
class Stopping(Protocol):
    """A policy that ends a row's draft while it is being made. Drafts made so far are verified in any case."""

    def start(self, device: torch.device) -> None:
        """Decoding begins: make what `goes_on` reads on the device. Its addresses must stay."""

    def goes_on(self, logits_BV: Tensor, q_BV: Tensor | None, token_B: Tensor, step: int) -> Tensor:
        """bool [B]: whether to draft another token after `token_B`, the one of `step`, drawn from these. On the device,
        without reading the host. logits: the draft's, transformed; q: None where it was not made.
        """


def build_lookahead(given: int | str | Mapping[str, Any] | Lookahead) -> Lookahead:
    """An int (fixed K), a conf/lookahead name, a mapping with `kind`, or a policy object as it is."""
    if isinstance(given, bool | float):
        raise UserError(f"lookahead={given!r} is not possible: give a whole number, a conf/lookahead name or a policy.")
    if isinstance(given, int):
        return Fixed(given)
    if isinstance(given, str):
        if given not in conf_names("lookahead"):
            raise UserError(f"No lookahead named {given!r}. {allowed(given, conf_names('lookahead'))}")
        given = load_conf("lookahead", given)  # type: ignore[assignment]
    if isinstance(given, Mapping):
        options = {str(key): value for key, value in given.items() if key != "kind"}
        kind = given.get("kind", "fixed")
        if not isinstance(kind, str) or kind not in POLICIES:
            raise UserError(f"No lookahead of kind {kind!r}. {allowed(str(kind), POLICIES)}")
        known = list(inspect.signature(POLICIES[kind]).parameters)
        if unknown := sorted(set(options) - set(known)):
            raise UserError(
                f"Bad options for lookahead {kind!r}: it has no {unknown[0]!r}. {allowed(unknown[0], known)} Where a "
                f"config that you build on sets it, leave it out with a tilde, as in ~lookahead.{unknown[0]}."
            )
        try:
            return POLICIES[kind](**options)
        except TypeError as error:
            raise UserError(f"Bad options for lookahead {kind!r}: {error}.") from error
    if not callable(getattr(given, "choose", None)):
        raise UserError(f"lookahead={given!r} is not possible: give a whole number, a conf/lookahead name or a policy.")
    return given
