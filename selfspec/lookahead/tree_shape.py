"""The shape of a draft tree: which node has how many children, fixed before it is drafted.

Nodes are numbered level by level, node 0 being the root (the pending token), and in a level the nodes that have
children come first: so what a drafter has to run is one stretch per level. A child's rank is its place among its
siblings, the likeliest first.

`best_shape` chooses the shape for a number of nodes as Medusa and EAGLE do for their static trees: greedily, always the
node that is most likely to be accepted, from the share of positions at which the draft's candidate of rank r at depth d
is the target's token. Its expected accepted length is the sum of the nodes' path probabilities (`chances_by_depth`), so
the greedy choice is the best one (a child is never likelier than its parent).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from selfspec.errors import UserError

MOST_NODES = 1 << 16  # a shape's, the root included: to make a larger one would take longer than any use of it


@dataclass(frozen=True)
class TreeShape:
    """parents[i−1] is the parent of node i, ranks[i−1] its place among its siblings. Made by `shape_of_paths`."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def num_nodes(self) -> int:
        """With the root."""
        return len(self.parents) + 1

    @property
    def num_slots(self) -> int:
        """One per node."""
        return self.num_nodes

    @cached_property
    def depths(self) -> tuple[int, ...]:
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        return max(self.depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Of each node, by rank."""
        found: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for child, parent in enumerate(self.parents, start=1):
            found[parent].append(child)
        return tuple(tuple(sorted(one, key=lambda child: self.ranks[child - 1])) for one in found)

    @cached_property
    def levels(self) -> tuple[tuple[int, int, int], ...]:
        """Per depth: its first node, the end of those with children, the end of all."""
        levels = []
        for depth in range(self.depth + 1):
            nodes = [node for node, d in enumerate(self.depths) if d == depth]
            inner = [node for node in nodes if self.children[node]]
            assert nodes == list(range(nodes[0], nodes[-1] + 1)) and inner == nodes[: len(inner)]
            levels.append((nodes[0], nodes[0] + len(inner), nodes[-1] + 1))
        return tuple(levels)

    @cached_property
    def ancestors(self) -> tuple[tuple[int, ...], ...]:
        """Of each node, from the root to itself."""
        paths: list[tuple[int, ...]] = [(0,)]
        for node, parent in enumerate(self.parents, start=1):
            paths.append((*paths[parent], node))
        return tuple(paths)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Of each node but the root, the ranks on the way to it: what `shape_of_paths` makes this shape from."""
        paths: list[tuple[int, ...]] = [()]
        for parent, rank in zip(self.parents, self.ranks, strict=True):
            paths.append((*paths[parent], rank))
        return tuple(paths[1:])


def shape_of_paths(paths: Sequence[Sequence[int]]) -> TreeShape:
    """From paths of ranks, as in Medusa's choices: [0] is the root's likeliest child, [0, 1] that child's second one.

    UserError for a path whose parent or whose better-ranked sibling is missing.
    """
    for rank in (rank for path in paths for rank in path):
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise UserError(f"The tree's paths hold {rank!r}; a rank is a whole number, 0 that of the likeliest child.")
    wanted = {tuple(path) for path in paths}
    if not wanted or () in wanted:
        raise UserError("A tree is given as a list of paths of ranks, each with one rank or more: [[0], [1], [0, 0]].")
    for path in sorted(wanted):
        missing = path[:-1] if path[:-1] and path[:-1] not in wanted else None
        if path[-1] < 0:
            raise UserError(f"The tree's path {list(path)} holds a negative rank; the likeliest child has rank 0.")
        if missing is None and path[-1] > 0 and (*path[:-1], path[-1] - 1) not in wanted:
            missing = (*path[:-1], path[-1] - 1)
        if missing is not None:
            raise UserError(f"The tree holds the path {list(path)}, but not {list(missing)}, which comes before it.")
    has_children = {path[:-1] for path in wanted}
    numbers: dict[tuple[int, ...], int] = {(): 0}
    parents, ranks = list[int](), list[int]()
    for depth in range(1, max(map(len, wanted)) + 1):
        level = sorted(path for path in wanted if len(path) == depth)
        for path in sorted(level, key=lambda path: path not in has_children):
            numbers[path] = len(numbers)
            parents.append(numbers[path[:-1]])
            ranks.append(path[-1])
    return TreeShape(tuple(parents), tuple(ranks))


def shape_of_branches(branches: Sequence[int]) -> TreeShape:
    """[4, 2, 1]: four children of the root, two of each of them, one of each of those."""
    if not branches or any(isinstance(b, bool) or not isinstance(b, int) or b < 1 for b in branches):
        raise UserError(f"branches={list(branches)} is not possible: give whole numbers of 1 or more, one per level.")
    num_nodes = of_level = 1
    for level, count in enumerate(branches, start=1):
        of_level *= count
        num_nodes += of_level
        if num_nodes > MOST_NODES:
            raise UserError(
                f"branches={list(branches)} is not possible: the first {level} levels alone have {num_nodes} nodes, "
                f"the root included; allowed are {MOST_NODES}."
            )
    paths: list[tuple[int, ...]] = [()]
    found: list[tuple[int, ...]] = []
    for count in branches:
        paths = [(*path, rank) for path in paths for rank in range(count)]
        found += paths
    return shape_of_paths(found)


def chances_by_depth(shape: TreeShape, accuracies: Sequence[Sequence[float]]) -> list[float]:
    """Entry d: the chance that one of the nodes at depth d+1 is accepted; their sum is the expected accepted length.

    accuracies: as for `best_shape`. The chance of a node is the product along its path: ranks at one depth are taken to
    say nothing about the next.
    """
    of_node, of_depth = [1.0], [0.0] * shape.depth
    for depth, parent, rank in zip(shape.depths[1:], shape.parents, shape.ranks, strict=True):
        of_node.append(of_node[parent] * accuracies[depth - 1][rank])
        of_depth[depth - 1] += of_node[-1]
    return of_depth


def best_shape(accuracies: Sequence[Sequence[float]], num_nodes: int) -> tuple[TreeShape, float]:
    """The tree of `num_nodes` nodes (with the root) of the largest expected accepted length, and that length.

    accuracies[d][r]: the share of positions at which the candidate of rank r at depth d+1 is right, given that its
    parent is.
    """
    if num_nodes < 2 or not accuracies or not accuracies[0]:
        raise UserError(f"num_nodes={num_nodes}: a tree has a root and at least one more node, and accuracies for it.")
    if num_nodes > MOST_NODES:
        raise UserError(f"num_nodes={num_nodes} is not possible: allowed are {MOST_NODES}, the root included.")
    heap: list[tuple[float, tuple[int, ...]]] = [(-accuracies[0][0], (0,))]
    chosen: list[tuple[int, ...]] = []
    while heap and len(chosen) < num_nodes - 1:
        weight, path = heapq.heappop(heap)
        chosen.append(path)
        at = accuracies[len(path) - 1]
        if path[-1] + 1 < len(at) and at[path[-1]] > 0:
            heapq.heappush(heap, (weight / at[path[-1]] * at[path[-1] + 1], (*path[:-1], path[-1] + 1)))
        if len(path) < len(accuracies):
            heapq.heappush(heap, (weight * accuracies[len(path)][0], (*path, 0)))
    shape = shape_of_paths(chosen)
    return shape, sum(chances_by_depth(shape, accuracies))
