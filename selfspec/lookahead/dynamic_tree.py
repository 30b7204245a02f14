"""A tree of a fixed size whose shape follows the draft's confidence in every round (EAGLE-2).

Where the draft is sure the tree is deep and narrow, where it is not it is wide. See `selfspec.lookahead.tree_growth`.
Cost beside a static tree of the same depth and size: a softmax's sum per expanded node, and a sort of all candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from selfspec.errors import UserError
from selfspec.lookahead.plan import Plan
from selfspec.lookahead.tree_growth import TreeGrowth


@dataclass
class DynamicTree:
    """depth: levels that are drafted. top_k: nodes expanded per level, and children of each. num_nodes: tokens that are
    verified, the pending one included.
    """

    depth: int = 4
    top_k: int = 4
    num_nodes: int = 12
    growth: TreeGrowth = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, least in (("depth", 1), ("top_k", 1), ("num_nodes", 2)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UserError(f"{name}={value!r} is not possible: allowed is a whole number, {least} or more.")
        most = self.num_nodes - 1
        for name in ("depth", "top_k"):  # a node is verified with all its parents and its better-ranked siblings
            if (value := getattr(self, name)) > most:
                raise UserError(
                    f"{name}={value} is not possible: num_nodes={self.num_nodes} tokens are verified, the pending one "
                    f"included, so nothing beyond {name}={most} ever would be. Ask for more num_nodes, or less {name}."
                )
        self.growth = TreeGrowth(self.depth, self.top_k, self.num_nodes)
        most = self.growth.num_candidates + 1
        if self.num_nodes > most:
            raise UserError(
                f"num_nodes={self.num_nodes} is not possible: depth={self.depth} and top_k={self.top_k} make a tree of "
                f"at most {most} nodes, the root included. Ask for fewer nodes, or for more depth or top_k."
            )

    @property
    def max_drafted(self) -> int:
        return self.depth

    @property
    def max_width(self) -> int:
        return self.growth.num_slots

    def choose(self) -> Plan:
        return Plan(self.depth, tree=self.growth)
