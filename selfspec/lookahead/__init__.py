"""How many tokens to draft in a round: one file per policy, one protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from selfspec.config import allowed, conf_names, load_conf
from selfspec.errors import UserError
from selfspec.lookahead.fixed import Fixed

__all__ = ["POLICIES", "Fixed", "Lookahead", "build_lookahead"]

POLICIES: dict[str, type] = {"fixed": Fixed}


class Lookahead(Protocol):
    """Decides the number of drafted tokens before each round."""

    @property
    def max_drafted(self) -> int:
        """The most it will ever ask for: the cache and the shapes are sized by it."""

    def choose(self) -> int:
        """K for the next round, at most `max_drafted`."""


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
        if kind not in POLICIES:
            raise UserError(f"No lookahead of kind {kind!r}. {allowed(str(kind), POLICIES)}")
        try:
            return POLICIES[kind](**options)
        except TypeError as error:
            raise UserError(f"Bad options for lookahead {kind!r}: {error}.") from error
    if not callable(getattr(given, "choose", None)):
        raise UserError(f"lookahead={given!r} is not possible: give a whole number, a conf/lookahead name or a policy.")
    return given
