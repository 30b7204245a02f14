"""Tree acceptance bound to its noise: how a drafter draws the children of a node, and how the tree is judged.

The pure functions are in `tree.py`; these objects only say which noise goes where. Children that are picked without
randomness (`rank_children`, for EAGLE's dynamic trees) leave Tree.q_BNV out, whatever the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from selfspec.errors import UserError
from selfspec.sampling import faults
from selfspec.sampling.acceptance.tree import (
    Children,
    Tree,
    TreeVerdict,
    accept_certain,
    accept_without_replacement,
    draw_without_replacement,
    follow_best,
    follow_drawn,
)
from selfspec.sampling.acceptance.verdict import Rule
from selfspec.sampling.argmax import best_few, first_argmax
from selfspec.sampling.distribution import probabilities
from selfspec.sampling.noise import STREAM_TREE, STREAM_VERIFY, NoiseKey, gumbel, uniforms
from selfspec.sampling.settings import Sampling


class TreeRule(Protocol):
    name: str
    lossy: bool
    needs_q: bool

    def draw_children(
        self, logits_BnV: Tensor, num_children: int, noise: NoiseKey, num_nodes: int, level: int, most_children: int
    ) -> Children:
        """Children of neighbouring nodes of one level, from their transformed logits: of `num_nodes`, or [B, 1, V]
        where they are the same for all (then certain children are those of one node).

        noise.step is the first node's number in the tree; most_children, of any node in it: so much of the noise is a
        node's own. level: the nodes' distance from the root.
        """
        ...

    def rank_children(
        self, logits_BnV: Tensor, num_children: int, noise: NoiseKey, level: int
    ) -> tuple[Children, Tensor]:
        """The likeliest children of each node, certain ones whatever the rule, and log-probabilities [B, n, C] that say
        how likely; −inf for those that do not exist.
        """
        ...

    def accept(self, tree: Tree, logits_BNV: Tensor, noise: NoiseKey) -> TreeVerdict: ...


class GreedyTree:
    name = "greedy"
    lossy = False
    needs_q = False

    def draw_children(
        self, logits_BnV: Tensor, num_children: int, noise: NoiseKey, num_nodes: int, level: int, most_children: int
    ) -> Children:
        return _best(logits_BnV, num_children)

    def rank_children(
        self, logits_BnV: Tensor, num_children: int, noise: NoiseKey, level: int
    ) -> tuple[Children, Tensor]:
        return _ranked(logits_BnV, num_children)

    def accept(self, tree: Tree, logits_BNV: Tensor, noise: NoiseKey) -> TreeVerdict:
        return follow_best(tree, logits_BNV)


class CoupledTree:
    """Children are the best under the noise that the target's own draw at that position will use."""

    name = "coupled"
    lossy = False
    needs_q = False

    def draw_children(
        self, logits_BnV: Tensor, num_children: int, noise: NoiseKey, num_nodes: int, level: int, most_children: int
    ) -> Children:
        return _best(_with_gumbel(logits_BnV, noise, level), num_children)

    def rank_children(
        self, logits_BnV: Tensor, num_children: int, noise: NoiseKey, level: int
    ) -> tuple[Children, Tensor]:
        """Likely is what the draft with that noise finds likely: the output is the same whatever is picked."""
        return _ranked(_with_gumbel(logits_BnV, noise, level), num_children)

    def accept(self, tree: Tree, logits_BNV: Tensor, noise: NoiseKey) -> TreeVerdict:
        def own_draw(logits_BV: Tensor, level: int) -> Tensor:
            return first_argmax(_with_gumbel(logits_BV[:, None], noise, level)[:, 0])

        return follow_drawn(tree, logits_BNV, own_draw)


class RejectionTree:
    name = "rejection"
    lossy = False
    needs_q = True

    def draw_children(
        self, logits_BnV: Tensor, num_children: int, noise: NoiseKey, num_nodes: int, level: int, most_children: int
    ) -> Children:
        q_BnV = probabilities(logits_BnV).expand(-1, num_nodes, -1)
        key = (noise.seed, noise.request_B, noise.position_B)
        u_BU = uniforms(*key, STREAM_TREE, num_nodes * most_children, noise.step * most_children)
        u_BnC = u_BU.unflatten(1, (num_nodes, most_children))[..., :num_children]
        drawn = draw_without_replacement(q_BnV.flatten(0, 1), u_BnC.flatten(0, 1))
        tokens_BnC, exist_BnC = (one.unflatten(0, (-1, num_nodes)) for one in drawn)
        broken_Bn = faults.broken(logits_BnV.amax(-1)).expand(-1, num_nodes)
        return Children(tokens_BnC, exist_BnC, broken_Bn, q_BnV)

    def rank_children(
        self, logits_BnV: Tensor, num_children: int, noise: NoiseKey, level: int
    ) -> tuple[Children, Tensor]:
        return _ranked(logits_BnV, num_children)

    def accept(self, tree: Tree, logits_BNV: Tensor, noise: NoiseKey) -> TreeVerdict:
        key = (noise.seed, noise.request_B, noise.position_B)
        if tree.q_BNV is None:
            return accept_certain(tree, logits_BNV, uniforms(*key, STREAM_VERIFY, tree.depth + 1))
        B, _, C = tree.children_BNC.shape
        u_BU = uniforms(*key, STREAM_VERIFY, 1 + tree.depth * C)
        return accept_without_replacement(tree, logits_BNV, u_BU[:, 1:].reshape(B, tree.depth, C), u_BU[:, 0])


def build_tree_rule(acceptance: str, sampling: Sampling) -> TreeRule:
    """As `build_rule`, for trees. Raises UserError for rules that have no tree form."""
    rules: dict[str, type[TreeRule]] = {"rejection": RejectionTree, "coupled": CoupledTree}
    if acceptance not in ("auto", "greedy", *rules):
        raise UserError(f"acceptance={acceptance!r} has no tree form: use one of auto, greedy, {', '.join(rules)}.")
    if sampling.greedy:
        return GreedyTree()
    if acceptance == "greedy":
        raise UserError("acceptance='greedy' needs temperature=0. When sampling use acceptance='rejection'.")
    return rules["rejection" if acceptance == "auto" else acceptance]()


def tree_rule_of(rule: Rule, sampling: Sampling) -> TreeRule:
    """The tree form of a chain's rule; a rule that watches (`watch_tree`) also watches its tree form."""
    tree_rule = build_tree_rule(rule.name, sampling)
    watch: Callable[[TreeRule], TreeRule] | None = getattr(rule, "watch_tree", None)
    return tree_rule if watch is None else watch(tree_rule)


def _best(scores_BnV: Tensor, num_children: int) -> Children:
    return _children(*best_few(scores_BnV, num_children))


def _ranked(scores_BnV: Tensor, num_children: int) -> tuple[Children, Tensor]:
    """Never above 0, so that no path is likelier than its beginning."""
    values_BnC, tokens_BnC = best_few(scores_BnV, num_children)
    children = _children(values_BnC, tokens_BnC)
    log_BnC = (values_BnC.float() - scores_BnV.float().logsumexp(-1, keepdim=True)).clamp(max=0)
    return children, torch.where(children.exist_BnC, log_BnC, -torch.inf)


def _children(values_BnC: Tensor, tokens_BnC: Tensor) -> Children:
    """Certain ones, the best first: NaN would be, and then there are none."""
    broken_Bn = faults.broken(values_BnC[..., 0])
    return Children(tokens_BnC, (values_BnC > -torch.inf) & ~broken_Bn[..., None], broken_Bn)


def _with_gumbel(logits_BnV: Tensor, noise: NoiseKey, level: int) -> Tensor:
    position_B1 = noise.position_B[:, None] + level
    return logits_BnV + gumbel(noise.seed, noise.request_B, position_B1, logits_BnV.shape[-1])
