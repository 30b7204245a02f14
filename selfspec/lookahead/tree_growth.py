"""A draft tree that is grown to the draft's own confidence: what is fixed about it, so that rounds keep their shapes.

EAGLE-2 (Li et al. 2024, arXiv 2406.16858, sections 4.1 and 4.2). The root's `top_k` likeliest candidates are the first
level. Of every level the `top_k` candidates with the likeliest paths (product of the draft's probabilities) are
expanded, each to its `top_k` likeliest children; after `depth` levels the best `num_nodes` − 1 of all candidates, the
root added, are verified. Every round has the same number of nodes; which are whose children differs by row and round.

Slots, behind a row's text: the root, the expanded nodes of levels 1 to depth − 1, then one for every node that is
verified (those that were expanded leave theirs empty: they stay where the draft has run them).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class TreeGrowth:
    """Hashable: a captured round is keyed by it. Checked by `selfspec.lookahead.dynamic_tree`."""

    depth: int
    top_k: int
    num_nodes: int  # that are verified, with the root

    @cached_property
    def expanded(self) -> tuple[int, ...]:
        """Nodes that are expanded, by level: the root, then at most `top_k`."""
        return (1, *(self.top_k for _ in range(self.depth - 1)))

    @cached_property
    def first_slots(self) -> tuple[int, ...]:
        """The slot of each level's first expanded node, and of the first node that was not."""
        return (0, *accumulate(self.expanded))

    @property
    def num_expanded(self) -> int:
        return 1 + self.top_k * (self.depth - 1)

    @property
    def num_candidates(self) -> int:
        """Of all levels, without the root."""
        return self.top_k * self.num_expanded

    @property
    def num_slots(self) -> int:
        return self.num_expanded + self.num_nodes - 1
