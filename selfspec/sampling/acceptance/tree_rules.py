"""Tree acceptance bound to its noise: how a drafter draws the children of a node, and how the tree is judged.

The pure functions are in `tree.py`; these objects only say which noise goes where. A drafter that picks its children
without randomness (EAGLE's dynamic trees) leaves Tree.q_BNV out, whatever the rule.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from selfspec.errors import UserError
from selfspec.sampling.acceptance.tree import (
    Tree,
    TreeVerdict,
    accept_certain,
    accept_without_replacement,
    draw_without_replacement,
    follow,
)
from selfspec.sampling.distribution import probabilities
from selfspec.sampling.noise import STREAM_TREE, STREAM_VERIFY, NoiseKey, gumbel, uniforms
from selfspec.sampling.settings import Sampling


class TreeRule(Protocol):
    name: str
    lossy: bool
    needs_q: bool

    def draw_children(
        self, logits_BV: Tensor, num_children: int, noise: NoiseKey, level: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Children of one node per row: tokens [B, C], which of them exist [B, C], and q [B, V] or None if certain.

        noise.step is the node's number in the tree (its own noise); level its distance from the root.
        """
        ...

    def accept(self, tree: Tree, logits_BNV: Tensor, noise: NoiseKey) -> TreeVerdict: ...


class GreedyTree:
    name = "greedy"
    lossy = False
    needs_q = False

    def draw_children(
        self, logits_BV: Tensor, num_children: int, noise: NoiseKey, level: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        return (*_best(logits_BV, num_children), None)

    def accept(self, tree: Tree, logits_BNV: Tensor, noise: NoiseKey) -> TreeVerdict:
        return follow(tree, logits_BNV, lambda logits_BV, level: logits_BV.argmax(dim=-1))


class CoupledTree:
    """Children are the best under the noise that the target's own draw at that position will use."""

    name = "coupled"
    lossy = False
    needs_q = False

    def draw_children(
        self, logits_BV: Tensor, num_children: int, noise: NoiseKey, level: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        return (*_best(_with_gumbel(logits_BV, noise, level), num_children), None)

    def accept(self, tree: Tree, logits_BNV: Tensor, noise: NoiseKey) -> TreeVerdict:
        return follow(tree, logits_BNV, lambda logits_BV, level: _with_gumbel(logits_BV, noise, level).argmax(dim=-1))


class RejectionTree:
    name = "rejection"
    lossy = False
    needs_q = True

    def draw_children(
        self, logits_BV: Tensor, num_children: int, noise: NoiseKey, level: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        q_BV = probabilities(logits_BV)
        key = (noise.seed, noise.request_B, noise.position_B)
        u_BC = uniforms(*key, STREAM_TREE, num_children, noise.step * num_children)
        return (*draw_without_replacement(q_BV, u_BC), q_BV)

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


def _best(scores_BV: Tensor, num_children: int) -> tuple[Tensor, Tensor]:
    top = scores_BV.topk(num_children, dim=-1)
    return top.indices, top.values > -torch.inf


def _with_gumbel(logits_BV: Tensor, noise: NoiseKey, level: int) -> Tensor:
    position_B1 = noise.position_B[:, None] + level
    return logits_BV + gumbel(noise.seed, noise.request_B, position_B1, logits_BV.shape[-1])[:, 0]
