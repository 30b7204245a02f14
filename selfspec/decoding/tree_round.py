"""What a round with a tree does differently: all nodes are verified at once, and the accepted path becomes a chain.

The path's keys and values move to the slots a chain would have written (`selfspec.cache.tree_block.move`), in the
shared cache and in a draft's own; from there on the round is that of a chain of the tree's depth, and nothing of the
other branches is left.

Shape letters: B rows, N nodes of the tree, P slots they stand in, D its depth, V vocabulary, F features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfspec.cache import KVCache, Pass
from selfspec.cache.tree_block import move
from selfspec.decoding.tree_layout import TreeLayout, block_of
from selfspec.drafters.base import Draft
from selfspec.sampling import Verdict
from selfspec.sampling.acceptance.tree import Tree

if TYPE_CHECKING:
    from selfspec.decoding.rows import Rows
    from selfspec.decoding.sampler import Sampler


def open_tree(rows: Rows, layout: TreeLayout) -> Pass:
    """A pass of the target over all nodes."""
    positions_BN, block = block_of(rows, layout.slots_RN, layout.depths_RN, layout.seen_RNP, layout.slot_depths_RP)
    return rows.cache.open(positions_BN, rows.extent(0, layout.num_slots), tree=block)


def as_chain(
    rows: Rows, draft: Draft, logits_BNV: Tensor, features_BNF: Tensor | None, sampler: Sampler
) -> tuple[Draft, Verdict, Tensor, Tensor | None]:
    """Judge the tree and keep its accepted path: that path as a chain, the verdict on it, α as `Sampler.alpha` counts
    it, and the features of pending token and path.
    """
    tree, layout = draft.tree, draft.layout
    assert tree is not None and layout is not None
    judged = sampler.accept_tree(rows, tree, sampler.transform_tree(rows, layout, logits_BNV))
    stays_BD = (judged.path_BD > 0) & rows.active_B[:, None]
    depths_D = torch.arange(1, tree.depth + 1, device=rows.device)
    slots_BD = layout.slots_RN.expand(rows.num_rows, -1).gather(1, judged.path_BD)
    from_BD = torch.where(stays_BD, rows.lengths_B[:, None] + slots_BD, -1)
    to_BD = torch.where(stays_BD, rows.lengths_B[:, None] + depths_D, -1)
    move(rows.cache, from_BD, to_BD)
    if isinstance(rows.draft_state, KVCache):  # a draft whose own cache has the tree's slots
        move(rows.draft_state, from_BD, to_BD)
    path_BD = walked(tree, judged.path_BD)
    num_drafted_B = (path_BD > 0).sum(1)
    chain = Draft(tree.tokens_BN.gather(1, path_BD), num_drafted_B, source_B=draft.source_B)
    if features_BNF is not None:
        nodes_BT = torch.nn.functional.pad(path_BD, (1, 0))
        features_BNF = features_BNF.gather(1, nodes_BT[..., None].expand(-1, -1, features_BNF.shape[-1]))
    tested_B = torch.minimum(judged.num_accepted_B + 1, num_drafted_B)  # at a leaf nothing is tested
    alpha_B2 = torch.stack([judged.num_accepted_B, tested_B], 1).double()
    if sampler.rule.name != "greedy":
        alpha_B2 = torch.zeros_like(alpha_B2)  # how often one of several stands is not α
    return chain, Verdict(judged.num_accepted_B, judged.next_token_B, judged.error_B), alpha_B2, features_BNF


def walked(tree: Tree, path_BD: Tensor) -> Tensor:
    """The path, and behind its end the likeliest children down to a leaf, then 0: what a record shows as drafted."""
    node_B, nodes = torch.zeros_like(path_BD[:, 0]), list[Tensor]()
    for level in range(tree.depth):
        first_child_B = tree.children_BNC[:, :, 0].gather(1, node_B[:, None])[:, 0]
        if nodes:
            first_child_B = torch.where(node_B > 0, first_child_B, 0)  # behind a leaf
        node_B = torch.where(path_BD[:, level] > 0, path_BD[:, level], first_child_B)
        nodes.append(node_B)
    return torch.stack(nodes, 1)
