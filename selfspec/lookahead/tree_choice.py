"""Which tree brings the most tokens per second, from how often candidates are right and from what a round costs.

    rate(tree) = (1 + E[accepted]) / (v(nodes) + Σ_levels c + other)

E[accepted] is `best_shape`'s, for every depth and number of nodes; v comes from measured passes of the target over so
many positions (between two measured widths a straight line), c from the draft. Where v is flat (a CPU with AMX, a GPU
at one row) wide trees pay; where every position costs, the best tree is a short chain.

Cost: some arithmetic, once, before decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from selfspec.errors import UserError
from selfspec.lookahead.tree_shape import TreeShape, best_shape


@dataclass(frozen=True)
class TreeChoice:
    """A tree and what it is expected to bring. Costs are in the unit of `verify_cost`."""

    shape: TreeShape
    expected_emitted: float  # tokens per round, the target's own one included
    round_cost: float
    speedup: float  # over rounds without a draft, in the same unit

    @property
    def paths(self) -> list[list[int]]:
        """For `lookahead={"kind": "tree", "paths": ...}`."""
        return [list(path) for path in self.shape.paths]

    @property
    def num_nodes(self) -> int:
        """With the root: positions of a verify pass."""
        return self.shape.num_nodes

    @property
    def depth(self) -> int:
        return self.shape.depth

    @property
    def top_k(self) -> int:
        """The most nodes of a level that have children, or children of a node: for a dynamic tree of this size."""
        widths = [inner - first for first, inner, _ in self.shape.levels]
        return max(*widths, *(len(children) for children in self.shape.children))


def best_tree(
    accuracies: Sequence[Sequence[float]],
    verify_cost: Mapping[int, float],
    draft_cost: float | Sequence[float],
    *,
    max_nodes: int | None = None,
    other_cost: float = 0.0,
) -> TreeChoice:
    """The static tree of the most tokens per second. If no tree pays it is still the best one: see its `speedup`.

    accuracies: `[depth][rank]`, as `selfspec.measure.rank_accuracy` measures them. verify_cost: of a target pass over
    so many positions, 1 among them, in any unit. draft_cost: of each level in that unit; a sequence where levels differ
    (for heads that are read at once: the whole draft first, then 0). other_cost: what a round costs beside both, beyond
    a round without a draft. max_nodes: the largest tree, root included; None: the widest pass that was measured.
    UserError for costs that are missing or not above 0.
    """
    widest = check_costs(verify_cost)
    most = widest if max_nodes is None else min(max_nodes, widest)
    if most < 2:
        raise UserError(f"Trees of at most {most} nodes: a tree has a root and one node more; measure wider passes.")
    level_costs = [draft_cost] * len(accuracies) if isinstance(draft_cost, int | float) else list(draft_cost)
    if len(level_costs) < len(accuracies) or any(cost < 0 for cost in level_costs):
        raise UserError(f"draft_cost={draft_cost!r}: give one cost for all levels, or one for each; 0 or more.")
    best: TreeChoice | None = None
    for depth in range(1, len(accuracies) + 1):
        for num_nodes in range(2, most + 1):
            shape, accepted = best_shape(accuracies[:depth], num_nodes)
            cost = cost_at(verify_cost, shape.num_nodes) + sum(level_costs[: shape.depth]) + other_cost
            speedup = (1 + accepted) / cost * verify_cost[1]
            if best is None or speedup > best.speedup:
                best = TreeChoice(shape, 1 + accepted, cost, speedup)
    if best is None:
        raise UserError("accuracies are empty: give the shares of at least one depth.")
    return best


def check_costs(verify_cost: Mapping[int, float]) -> int:
    """The widest measured pass; UserError for what is no cost."""
    if 1 not in verify_cost or any(width < 1 or not cost > 0 for width, cost in verify_cost.items()):
        raise UserError(
            f"verify_cost={dict(verify_cost)}: give costs above 0 by number of positions, 1 position among them."
        )
    return max(verify_cost)


def cost_at(verify_cost: Mapping[int, float], width: int) -> float:
    """On the straight line between the nearest measured widths."""
    if width in verify_cost:
        return verify_cost[width]
    below = max(w for w in verify_cost if w < width)
    above = min(w for w in verify_cost if w > width)
    share = (width - below) / (above - below)
    return verify_cost[below] + share * (verify_cost[above] - verify_cost[below])
