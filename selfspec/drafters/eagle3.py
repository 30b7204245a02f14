"""Draft with a trained EAGLE-3 head: one layer over the target's hidden states and the next token's embedding.

Li et al. 2025 (arXiv 2503.01840). Position p reads the features of p and the embedding of token p+1, and predicts token
p+2; so the position before the pending token gives the first draft. A round:

    propose   its output, kept from the last refresh -> first draft; further steps run the layer on its own output
    refresh   the K+1 verified positions again with the target's true features: the draft's keys and values never stay
              its own guesses (which costs 8 to 15% of τ elsewhere), and the output before the pending token is kept

Cost of K drafts: K heads, K passes of the layer (the last one over K+1 tokens) and `fc` once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from selfspec.cache import KVCache, LayerShape, Pass
from selfspec.drafters.base import Draft, Seen
from selfspec.drafters.checkpoint import load_into, read_checkpoint
from selfspec.drafters.draft_layer import DraftLayer, PlainRotary, config_value, own_head
from selfspec.drafters.eagle3_head import Eagle3Head, HeadShape
from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.target.fused import RMSNorm
from selfspec.target.packed import PackedLinear

if TYPE_CHECKING:
    from selfspec.decoding.drafting import Drafting
    from selfspec.decoding.rows import Rows


@dataclass
class Options:
    """checkpoint: a folder with a trained draft, made by experiments/train.py or imported."""

    checkpoint: str


@dataclass
class FeatureState:
    """Per row: the layer's keys and values, and its output at the position before the pending token."""

    cache: KVCache
    output_BM: Tensor

    def reset(self, row: int, prompt_ids: list[int], request: int) -> None:
        """A prompt of one token has no position before the pending one: its first draft comes from nothing."""
        self.output_BM[row].zero_()


class Eagle3:
    """Drafts from a head that was trained for this very target."""

    name = "eagle3"
    max_drafted: int | None = None

    def __init__(
        self, target: Target, head: Eagle3Head, feature_layers: tuple[int, ...], token_ids_V: Tensor | None
    ) -> None:
        shape, layer = head.shape, head.layer
        self.target, self.feature_layers = target, feature_layers
        self._fc = PackedLinear(head.fc.weight, None)
        self._norm_embedded, self._norm_hidden = RMSNorm(layer.input_layernorm), RMSNorm(layer.hidden_norm)
        self._layer = DraftLayer(
            layer,
            shape.num_heads,
            LayerShape(shape.num_kv_heads, shape.head_dim),
            PlainRotary(shape.rope_theta, shape.head_dim),
            target.dtype,
        )
        self._norm = RMSNorm(head.norm)
        self._unembed = own_head(target, head.lm_head.weight, token_ids_V)
        self._weight_bytes = self._layer.nbytes + sum(
            linear.weight.numel() * target.dtype.itemsize for linear in (head.fc, head.lm_head)
        )

    def draft_bytes(self, num_rows: int, capacity: int) -> tuple[int, int]:
        state = self._layer.cache_bytes(num_rows, capacity) + num_rows * self.target.width * self.target.dtype.itemsize
        return self._weight_bytes, state

    def start(self, rows: Rows) -> None:
        output_BM = torch.zeros(rows.num_rows, self.target.width, dtype=self.target.dtype, device=rows.device)
        rows.draft_state = FeatureState(self._layer.make_cache(rows), output_BM)

    def prefill(self, rows: Rows, seen: Seen) -> None:
        self.refresh(rows, seen)

    def refresh(self, rows: Rows, seen: Seen) -> None:
        assert seen.features_BTF is not None
        state = state_of(rows)
        pass_ = state.cache.open(seen.positions_BT, seen.extent, seen.rows)
        seen.keep(state.output_BM, self._step(self._fc(seen.features_BTF), seen.next_ids_BT, pass_))

    def propose(self, rows: Rows, drafting: Drafting) -> Draft:
        state = state_of(rows)
        hidden_B1M = state.output_BM[:, None]
        for step in drafting:
            if step > 0:
                pass_ = state.cache.open(rows.positions(step - 1, 1), rows.extent(step - 1, 1))
                hidden_B1M = self._step(hidden_B1M, rows.window(step, 1), pass_)
            drafting.draw(self._unembed(self._norm(hidden_B1M))[:, 0])
        return drafting.draft()

    def _step(self, hidden_BTM: Tensor, next_ids_BT: Tensor, pass_: Pass) -> Tensor:
        """The layer at the positions of `pass_`: `hidden_BTM` are features, or its own output one position before."""
        embedded_BTM = self._norm_embedded(self.target.embed(next_ids_BT))
        return self._layer.run(torch.cat([embedded_BTM, self._norm_hidden(hidden_BTM)], -1), hidden_BTM, pass_)


def state_of(rows: Rows) -> FeatureState:
    assert isinstance(rows.draft_state, FeatureState), "start() was not called for these rows"
    return rows.draft_state


def build(target: Target, options: Options) -> Eagle3:
    checkpoint = read_checkpoint(options.checkpoint, "eagle3", target)
    given: Any = config_value(checkpoint, "shape")
    try:
        shape = HeadShape(**given)
    except TypeError as error:
        raise UserError(f"{checkpoint.folder}/config.json: shape is not an eagle3 head's ({error}).") from error
    layers = config_value(checkpoint, "feature_layers")
    if len(layers) != 3 or not all(0 <= layer <= target.num_layers for layer in layers):
        raise UserError(
            f"{checkpoint.folder}/config.json: feature_layers={layers} must be three layers from 0 to "
            f"{target.num_layers}."
        )
    with torch.device("meta"):
        head = Eagle3Head(shape)
    load_into(head, checkpoint)
    return Eagle3(target, head, tuple(layers), checkpoint.token_ids)
