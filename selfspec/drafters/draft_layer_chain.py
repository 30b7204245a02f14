"""Drafting with one layer that reads the target's hidden states and then its own output: eagle3 and mtp.

Position p reads the hidden states of p and the embedding of token p+1, and predicts token p+2; so the position before
the pending token gives the first draft. A round:

    propose   the layer's output there, kept from the last refresh -> first draft; every further one runs the layer once
              more, on its own output and the token just drafted
    refresh   the K+1 verified positions again, with the target's true hidden states: the layer's keys and values never
              stay its own guesses (which costs 8 to 15% of τ elsewhere); the output before the pending token is kept

Cost of K drafts: K heads, K passes of the layer (the last one over K+1 tokens), and the features joined once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfspec.cache import KVCache, Pass
from selfspec.drafters.base import Draft, Seen
from selfspec.drafters.draft_layer import DraftLayer
from selfspec.drafters.stretch import Stretch
from selfspec.target import Target

if TYPE_CHECKING:
    from selfspec.decoding.drafting import Drafting
    from selfspec.decoding.rows import Rows
    from selfspec.decoding.tree_drafting import Growing


@dataclass
class ChainState:
    """Per row: the layer's keys and values, and its output at the position before the pending token."""

    cache: KVCache
    output_BM: Tensor

    def reset(self, row: int, prompt_ids: list[int], request: int) -> None:
        """A prompt of one token has no position before the pending one: its first draft comes from nothing."""
        self.output_BM[row].zero_()


@dataclass(frozen=True)
class ChainParts:
    """What one kind of draft does where the kinds differ, as functions of packed weights."""

    join_features: Callable[[Tensor], Tensor]  # [B, T, F] -> [B, T, M]: what takes the place of the layer's own output
    join_token: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # embedding, hidden -> attention's input, residual
    layer: DraftLayer
    logits: Callable[[Tensor], Tensor]  # the layer's output -> [B, T, V], −inf for what cannot be drafted
    weight_bytes: int


class ChainDrafter:
    """Drafts from a layer trained for this very target; made by `eagle3.build` and `mtp.build`."""

    max_drafted: int | None = None

    def __init__(self, name: str, target: Target, feature_layers: tuple[int, ...], parts: ChainParts) -> None:
        self.name, self.target, self.feature_layers, self.parts = name, target, feature_layers, parts

    def draft_bytes(self, num_rows: int, capacity: int) -> tuple[int, int]:
        kept = num_rows * self.target.width * self.target.dtype.itemsize
        return self.parts.weight_bytes, self.parts.layer.cache_bytes(num_rows, capacity) + kept

    def start(self, rows: Rows) -> None:
        output_BM = torch.zeros(rows.num_rows, self.target.width, dtype=self.target.dtype, device=rows.device)
        rows.draft_state = ChainState(self.parts.layer.make_cache(rows), output_BM)

    def prefill(self, rows: Rows, seen: Seen) -> None:
        self.refresh(rows, seen)

    def refresh(self, rows: Rows, seen: Seen) -> None:
        assert seen.features_BTF is not None
        state = state_of(rows)
        pass_ = state.cache.open(seen.positions_BT, seen.extent, seen.rows)
        seen.keep(state.output_BM, self._step(self.parts.join_features(seen.features_BTF), seen.next_ids_BT, pass_))

    def propose(self, rows: Rows, drafting: Drafting) -> Draft:
        state = state_of(rows)
        hidden_B1M = state.output_BM[:, None]
        for step in drafting:
            if step > 0:
                stretch = Stretch(rows, slice(step, step + 1), behind=1)
                hidden_B1M = self._step(hidden_B1M, stretch.token_ids_BT, stretch.open(state.cache))
            drafting.draw(self.parts.logits(hidden_B1M)[:, 0])
        return drafting.draft()

    def propose_tree(self, rows: Rows, growing: Growing) -> Draft:
        """As a chain, with all nodes of a level at once, each on its parent's output."""
        state = state_of(rows)
        hidden_BnM = state.output_BM[:, None]
        for level in growing:
            if level > 0:
                stretch = Stretch(rows, growing.nodes, growing, behind=1)
                parents_BnM = growing.of_parents(hidden_BnM)
                hidden_BnM = self._step(parents_BnM, stretch.token_ids_BT, stretch.open(state.cache))
            growing.grow(self.parts.logits(hidden_BnM))
        return growing.draft()

    def _step(self, hidden_BTM: Tensor, next_ids_BT: Tensor, pass_: Pass) -> Tensor:
        """The layer at the positions of `pass_`; hidden: joined features, or its own output one position before."""
        normed_BTX, residual_BTM = self.parts.join_token(self.target.embed(next_ids_BT), hidden_BTM)
        return self.parts.layer.run(normed_BTX, residual_BTM, pass_)


def state_of(rows: Rows) -> ChainState:
    assert isinstance(rows.draft_state, ChainState), "start() was not called for these rows"
    return rows.draft_state
