"""The same draft tree in every round, for drafters that can grow one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from selfspec.errors import UserError
from selfspec.lookahead.confidence import check_probability
from selfspec.lookahead.plan import Plan
from selfspec.lookahead.tree_shape import TreeShape, best_shape, shape_of_branches, shape_of_paths


@dataclass
class Tree:
    """One of: branches, children per node and level; paths of ranks (Medusa's choices); or accuracies, measured shares
    [depth][rank], with num_nodes (the root included), from which the best tree is built.
    """

    branches: Sequence[int] | None = None
    paths: Sequence[Sequence[int]] | None = None
    accuracies: Sequence[Sequence[float]] | None = None
    num_nodes: int | None = None
    shape: TreeShape = field(init=False, repr=False)

    def __post_init__(self) -> None:
        given = [name for name in ("branches", "paths", "accuracies") if getattr(self, name) is not None]
        if len(given) != 1 or (self.num_nodes is not None) != (self.accuracies is not None):
            raise UserError(
                f"A tree is given by one of branches, paths, or accuracies with num_nodes; given: {', '.join(given)}."
            )
        if self.branches is not None:
            self.shape = shape_of_branches(list(self.branches))
        elif self.paths is not None:
            self.shape = shape_of_paths([list(path) for path in self.paths])
        elif self.accuracies is not None and self.num_nodes is not None:
            check_accuracies(self.accuracies, self.num_nodes)
            self.shape, _ = best_shape([list(at) for at in self.accuracies], self.num_nodes)

    @property
    def max_drafted(self) -> int:
        return self.shape.depth

    @property
    def max_width(self) -> int:
        return self.shape.num_nodes

    def choose(self) -> Plan:
        return Plan(self.shape.depth, tree=self.shape)


def check_accuracies(accuracies: Sequence[Sequence[float]], num_nodes: object) -> None:
    """UserError for a depth without ranks, what is no share, or a number of nodes that is none."""
    if isinstance(num_nodes, bool) or not isinstance(num_nodes, int):
        raise UserError(f"num_nodes={num_nodes!r} is not possible: allowed is a whole number, 2 or more.")
    for depth, shares in enumerate(accuracies):
        if not shares:
            raise UserError(f"accuracies[{depth}] is empty: give the share of each rank there, or leave it out.")
        for share in shares:
            check_probability(f"a share in accuracies[{depth}]", share)
