"""Several candidates per position: walk from the root of a draft tree down the children that the target accepts.

Two ways of drafting children, two ways of judging them, both exact:

- *certain* children (top-k, n-grams: no randomness). Accept child x with probability p'(x), else take x out of p' and
  renormalise. That is the same as drawing y ~ p and following the child that holds y, if there is one, which is how it
  is done here; so greedy (y = argmax) and coupled trees (y = the target's own draw at that position) are the same walk.
- children *drawn without replacement* from one q: recursive rejection sampling (Jeon et al. 2024, arXiv 2402.14160;
  Yang et al. 2024, 2402.11131). Test x against the current p' and q'; after a rejection p' <- norm(max(p' - q', 0)) and
  q' <- q' without x, *renormalised*. Dividing by the q that was not renormalised is the usual mistake.

A tree has N nodes, node 0 the root (the pending token); children come in the order drawn. Whether a node is expanded
may depend on its path and the q's; a child once drawn must not be withdrawn for what it turned out to be.
Cost: at temperature 0 one argmax over [B, N, V]; else per level one softmax and one draw over [B, V]; without
replacement also ~4 passes over [B, V] per child.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.sampling import faults
from selfspec.sampling.acceptance.rejection import accepted
from selfspec.sampling.acceptance.verdict import at
from selfspec.sampling.argmax import first_argmax
from selfspec.sampling.distribution import draw, probabilities


@dataclass(frozen=True)
class Tree:
    """tokens [B, N]; children [B, N, C] node numbers in the order drawn, 0 = none; q [B, N, V] of each node's children
    (a leaf's may be anything), or None when they are certain; depth = levels below the root. log_q [B, N]: how likely
    the draft found each node below its parent, for records; None where that was not computed. broken [B, N]: nodes
    without children because the draft's logits there were none (`faults.broken`); None: no such node."""

    tokens_BN: Tensor
    children_BNC: Tensor
    depth: int
    q_BNV: Tensor | None = None
    log_q_BN: Tensor | None = None
    broken_BN: Tensor | None = None


@dataclass(frozen=True)
class Children:
    """Of some nodes per row: tokens [B, n, C], which of them exist, and of which nodes none do because the logits there
    are broken [B, n]; q [B, n, V] unless certain; log q [B, n, C] if it is to be recorded."""

    tokens_BnC: Tensor
    exist_BnC: Tensor
    broken_Bn: Tensor
    q_BnV: Tensor | None = None
    log_q_BnC: Tensor | None = None


@dataclass(frozen=True)
class TreeVerdict:
    """num_accepted, next_token, error as in Verdict; path [B, depth] node numbers accepted at each level, 0 behind."""

    num_accepted_B: Tensor
    next_token_B: Tensor
    error_B: Tensor
    path_BD: Tensor


# (node [B], level) -> the token that the target chooses at that node, and its largest logit there, [B] each
OwnChoice = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def follow(tree: Tree, choose: OwnChoice) -> TreeVerdict:
    """Walk along the target's own choices, asked for at each node on the way."""
    node_B = torch.zeros_like(tree.tokens_BN[:, 0])
    alive_B = torch.ones_like(node_B, dtype=torch.bool)
    path: list[Tensor] = []
    next_token_B, top_B = choose(node_B, 0)
    for level in range(tree.depth):
        children_BC = at(tree.children_BNC, node_B)
        match_BC = (tree.tokens_BN.gather(1, children_BC) == next_token_B[:, None]) & (children_BC > 0)
        alive_B = alive_B & match_BC.any(dim=-1) & torch.isfinite(top_B)
        first_B1 = match_BC.to(torch.int8).argmax(dim=-1, keepdim=True)
        node_B = torch.where(alive_B, children_BC.gather(1, first_B1)[:, 0], node_B)
        path.append(torch.where(alive_B, node_B, 0))
        token_B, top_B = choose(node_B, level + 1)
        next_token_B = torch.where(alive_B, token_B, next_token_B)
    path_BD = torch.stack(path, dim=1) if path else tree.tokens_BN[:, :0]
    num_accepted_B = (path_BD > 0).sum(dim=1)
    error_B = faults.at_offset(faults.logits_fault(top_B), num_accepted_B)
    error_B = faults.earliest(error_B, broken_end(tree, node_B, num_accepted_B))
    return TreeVerdict(num_accepted_B, next_token_B, error_B, path_BD)


def follow_drawn(tree: Tree, logits_BNV: Tensor, draw_at: Callable[[Tensor, int], Tensor]) -> TreeVerdict:
    """`follow` where a choice depends on the level, too: `draw_at(logits [B, V], level) -> token [B]`."""

    def choose(node_B: Tensor, level: int) -> tuple[Tensor, Tensor]:
        logits_BV = at(logits_BNV, node_B)
        return draw_at(logits_BV, level), logits_BV.amax(dim=-1)

    return follow(tree, choose)


def follow_best(tree: Tree, logits_BNV: Tensor) -> TreeVerdict:
    """`follow` at temperature 0: the choices of all nodes are made at once."""
    chosen_BN = first_argmax(logits_BNV)
    top_BN = logits_BNV.gather(-1, chosen_BN[..., None])[..., 0]  # NaN counts as the largest
    return follow(tree, lambda node_B, level: (at(chosen_BN, node_B), at(top_BN, node_B)))


def accept_certain(tree: Tree, logits_BNV: Tensor, u_BD1: Tensor) -> TreeVerdict:
    """Certain children; u_BD1[:, level] is the uniform of each level, depth + 1 of them."""
    return follow_drawn(tree, logits_BNV, lambda logits_BV, level: draw(probabilities(logits_BV), u_BD1[:, level]))


def accept_without_replacement(
    tree: Tree, logits_BNV: Tensor, u_accept_BDC: Tensor, u_residual_B: Tensor
) -> TreeVerdict:
    """Children drawn without replacement from tree.q_BNV, in the order of tree.children_BNC.

    p' and q' stay weights, each with its sum beside it: to normalise them would be two more passes per child.
    """
    assert tree.q_BNV is not None, "children drawn without replacement come with their q"
    node_B = torch.zeros_like(tree.tokens_BN[:, 0])
    alive_B = torch.ones_like(node_B, dtype=torch.bool)
    p_BV = probabilities(at(logits_BNV, node_B))  # of the node where a row's walk is, or ended
    error_B = torch.zeros_like(node_B)
    path: list[Tensor] = []
    for level in range(tree.depth):
        q_BV, children_BC = at(tree.q_BNV, node_B), at(tree.children_BNC, node_B)  # copies
        p_sum_B1, q_sum_B1 = p_BV.sum(-1, keepdim=True), q_BV.sum(-1, keepdim=True)
        has_child_B = alive_B & (children_BC[:, 0] > 0)
        is_distribution_B = ((q_sum_B1[:, 0] - 1).abs() <= faults.Q_SUM_TOLERANCE) & (q_BV.amin(dim=-1) >= 0)
        fault_B = torch.where(has_child_B & ~is_distribution_B, faults.BAD_DRAFT_DISTRIBUTION, faults.OK)
        found_B, next_B = torch.zeros_like(alive_B), node_B
        for c in range(children_BC.shape[1]):
            child_B = children_BC[:, c]
            x_B1 = tree.tokens_BN.gather(1, child_B[:, None]).clamp(0, p_BV.shape[-1] - 1)
            tested_B = alive_B & ~found_B & (child_B > 0)
            p_x_B1, q_x_B1 = p_BV.gather(1, x_B1) / p_sum_B1, q_BV.gather(1, x_B1) / q_sum_B1
            impossible_B = tested_B & ~(q_x_B1[:, 0] > 0) & (fault_B == faults.OK)
            fault_B = torch.where(impossible_B, faults.IMPOSSIBLE_DRAFT, fault_B)
            stands_B = tested_B & accepted(p_x_B1, q_x_B1, u_accept_BDC[:, level, c, None])[:, 0]
            rejected_B1 = (tested_B & ~stands_B)[:, None]
            p_sum_B1 = take_away(p_BV, q_BV, torch.where(rejected_B1, p_sum_B1 / q_sum_B1, 0))
            if c + 1 < children_BC.shape[1]:  # there is another child to test
                q_sum_B1 = take_out(q_BV, x_B1)
            found_B, next_B = found_B | stands_B, torch.where(stands_B, child_B, next_B)
        error_B = faults.earliest(error_B, faults.at_offset(fault_B, torch.full_like(fault_B, level)))
        # a row that goes on is at its next node; one whose p' is empty, as p = q up to rounding, draws from p
        fresh_B, node_B = found_B | (alive_B & ~(p_sum_B1[:, 0] > 0)), next_B
        p_BV = torch.where(fresh_B[:, None], probabilities(at(logits_BNV, node_B)), p_BV)
        alive_B = found_B
        path.append(torch.where(alive_B, node_B, 0))
    path_BD = torch.stack(path, dim=1) if path else tree.tokens_BN[:, :0]
    num_accepted_B = (path_BD > 0).sum(dim=1)
    error_B = faults.earliest(faults.ending_fault(logits_BNV, node_B, num_accepted_B), error_B)
    error_B = faults.earliest(error_B, broken_end(tree, node_B, num_accepted_B))
    return TreeVerdict(num_accepted_B, draw(p_BV, u_residual_B), error_B, path_BD)


def broken_end(tree: Tree, end_B: Tensor, offset_B: Tensor) -> Tensor:
    """Code [B]: whether the walk ended at this node because the draft was broken there."""
    if tree.broken_BN is None:
        return torch.zeros_like(offset_B)
    return faults.at_offset(torch.where(at(tree.broken_BN, end_B), faults.BROKEN_DRAFT, faults.OK), offset_B)


def take_away(p_BV: Tensor, q_BV: Tensor, scale_B1: Tensor) -> Tensor:
    """p <- max(p − scale q, 0), in place; its sum [B, 1]."""
    return p_BV.addcmul_(q_BV, scale_B1, value=-1).clamp_min_(0).sum(-1, keepdim=True)


def take_out(q_BV: Tensor, x_B1: Tensor) -> Tensor:
    """q <- q without token x, in place; its sum [B, 1]."""
    return q_BV.scatter_(1, x_B1, 0.0).sum(-1, keepdim=True)


def draw_without_replacement(q_BV: Tensor, u_BC: Tensor) -> tuple[Tensor, Tensor]:
    """C tokens [B, C] drawn one after the other without replacement, and which of them exist (q may have fewer)."""
    tokens, exist, left_BV = [], [], q_BV.clone()
    sum_B1 = left_BV.sum(-1, keepdim=True)
    for c in range(u_BC.shape[1]):
        exist.append(sum_B1[:, 0] > 0)
        token_B = draw(left_BV, u_BC[:, c])
        tokens.append(token_B)
        sum_B1 = take_out(left_BV, token_B[:, None])
    return torch.stack(tokens, dim=1), torch.stack(exist, dim=1)
