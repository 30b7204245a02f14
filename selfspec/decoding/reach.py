"""How far a round may look ahead: what a policy asks for, checked against drafter and target before anything runs.

A round is as wide as the slots it writes, the pending token's included: K+1 for a chain, one per node for a tree, and
for one that is grown one more per node that is expanded. What it takes in memory follows from its width
(`selfspec.decoding.budget`); one that is wider than the target has positions is refused whatever memory there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from selfspec.decoding.requests import Request
from selfspec.decoding.tree_drafting import GrowsTrees
from selfspec.drafters import Drafter
from selfspec.drafters.base import Limited
from selfspec.errors import UserError
from selfspec.lookahead import Lookahead, build_lookahead
from selfspec.target import Target


def lookahead_for(target: Target, drafter: Drafter, given: int | str | Mapping[str, Any] | Lookahead) -> Lookahead:
    """The policy that is asked for. UserError when it may draft more tokens than the drafter can, or than the target
    has positions for.
    """
    policy = build_lookahead(given)
    if drafter.max_drafted not in (None, 0) and policy.max_drafted > drafter.max_drafted:
        raise UserError(
            f"The drafter {drafter.name!r} drafts at most {drafter.max_drafted} tokens; lookahead={policy.max_drafted}."
        )
    if (width := round_width(drafter, policy)) > target.max_positions:
        raise UserError(
            f"lookahead={policy!r:.200} makes a round of up to {width} tokens, drafted and pending; {target.name} has "
            f"{target.max_positions} positions, and no round may be wider. Draft fewer tokens."
        )
    if drafts_trees(policy) and not isinstance(drafter, GrowsTrees):
        raise UserError(
            f"The drafter {drafter.name!r} drafts one continuation, not a tree. Use a lookahead without a tree, or a "
            "drafter that grows one: early_exit, exit_adapter, layer_skip, clasp, eagle3, mtp, medusa, hydra, "
            "independent."
        )
    if exit_layers := getattr(policy, "exit_layers", None):
        check_exit = getattr(drafter, "check_exit", None)
        if check_exit is None:
            raise UserError(f"The lookahead chooses among exit layers, but {drafter.name!r} has one exit or none.")
        for exit_layer in exit_layers:
            check_exit(exit_layer)
    return policy


def capacity_for(drafter: Drafter, policy: Lookahead, requests: Sequence[Request]) -> int:
    """Tokens a row must hold: the longest prompt with its output, and one round."""
    lengths = [len(request.prompt_ids) + request.max_new_tokens for request in requests]
    check_reach(drafter, lengths)
    return max(lengths) + round_width(drafter, policy)


def check_reach(drafter: Drafter, lengths: Sequence[int]) -> None:
    """UserError when the drafter cannot serve the longest of these requests (prompt and output)."""
    if isinstance(drafter, Limited):
        drafter.check_capacity(max(lengths, default=0))


def round_width(drafter: Drafter, policy: Lookahead) -> int:
    """Tokens that a round writes: the pending one and the drafts."""
    return 1 if drafter.max_drafted == 0 else max(policy.max_drafted + 1, getattr(policy, "max_width", 0))


def drafts_trees(policy: Lookahead) -> bool:
    return getattr(policy, "max_width", 0) > 0
