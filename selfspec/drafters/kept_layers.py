"""Drafting with the target's own first layers, whose output is kept: verification goes on from there.

All drafted tokens go through layers [0, first_layer), the last ones too, from which nothing is drafted: they are
verified from there, and no layer below sees a token twice (Kangaroo's order, Liu et al. 2024: the shallow pass comes
before the decision to stop). Drafts differ in what turns that output into logits: the target's head (`early_exit`), a
trained layer before it (`exit_adapter`), the rest of the layers without some of their parts (`layer_skip`). With that
and `first_layer` a draft of this kind is complete, for chains and for trees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfspec.drafters.base import Draft
from selfspec.drafters.stretch import Stretch
from selfspec.target import Target

if TYPE_CHECKING:
    from selfspec.decoding.drafting import Drafting
    from selfspec.decoding.rows import Rows
    from selfspec.decoding.tree_drafting import Growing

OnStretch = Callable[[Tensor, Stretch], Tensor]  # [B, T, ...] of the tokens of a stretch -> [B, T, ...]


def unchanged(hidden_BTM: Tensor, stretch: Stretch) -> Tensor:
    return hidden_BTM


@dataclass(frozen=True)
class KeptLayers:
    """logits: of tokens that are drafted from, out of what `on_all` gave. on_all: what the draft runs on every token,
    the last ones too, on what leaves the kept layers (keys and values of its own must not miss any).
    """

    target: Target
    first_layer: int
    logits: OnStretch
    on_all: OnStretch = unchanged

    def chain(self, rows: Rows, drafting: Drafting) -> Draft:
        stretch = Stretch(rows, slice(0, 1))
        kept_B1M, top_B1M = self._run(rows, stretch)
        kept = [kept_B1M]
        for step in drafting:
            drafting.draw(self.logits(top_B1M, stretch)[:, 0])
            stretch = Stretch(rows, slice(step + 1, step + 2))
            kept_B1M, top_B1M = self._run(rows, stretch)
            kept.append(kept_B1M)
        return drafting.draft(torch.cat(kept, 1), self.first_layer)

    def tree(self, rows: Rows, growing: Growing) -> Draft:
        kept_BnM, top_BnM = self._run(rows, Stretch(rows, slice(0, 1), growing))
        kept = [kept_BnM]
        for _ in growing:
            nodes = growing.nodes  # those with children, which are drawn first
            growing.grow(self.logits(top_BnM[:, : nodes.stop - nodes.start], Stretch(rows, nodes, growing)))
            kept_BnM, top_BnM = self._run(rows, Stretch(rows, growing.drawn, growing))
            kept.append(kept_BnM)
        return growing.draft(torch.cat(kept, 1), self.first_layer)

    def _run(self, rows: Rows, stretch: Stretch) -> tuple[Tensor, Tensor]:
        """What leaves the kept layers, and what `on_all` makes of it."""
        embedded_BTM = self.target.embed(stretch.token_ids_BT)
        kept_BTM = self.target.run_layers(embedded_BTM, 0, self.first_layer, stretch.open(rows.cache))
        return kept_BTM, self.on_all(kept_BTM, stretch)
