"""Draft with a trained EAGLE-3 head: one layer over the target's hidden states and the next token's embedding.

Li et al. 2025 (arXiv 2503.01840). `fc` joins three levels of hidden states; the layer's queries, keys and values come
from [embedding; features], twice as wide as the model, its residual from the features alone. The rounds are those of
`selfspec.drafters.draft_layer_chain`; on one core of a CPU a draft step costs about what its weights' share of the
target's costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.cache import LayerShape
from selfspec.drafters.draft_layer import DraftLayer, PlainRotary, config_value
from selfspec.drafters.draft_layer_chain import ChainDrafter, ChainParts
from selfspec.drafters.eagle3_head import Eagle3Head, read_eagle3
from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.target.fused import RMSNorm
from selfspec.target.packed import PackedLinear
from selfspec.target.stack import spread


@dataclass
class Options:
    """checkpoint: a folder with a trained draft, made by experiments/train.py or imported."""

    checkpoint: str


class Unembed:
    """Logits `[B, T, V]` of the target's vocabulary, −inf for what the draft cannot say: through its own `lm_head`, or
    through the target's behind its map. Two products then, not one of their product: the target's rows, which are
    published in half precision, are packed in it.
    """

    def __init__(self, target: Target, head: Eagle3Head, token_ids_V: Tensor | None) -> None:
        has_own, shared = hasattr(head, "lm_head"), list[Callable[[Tensor], Tensor]]()
        weights = [head.lm_head.weight] if has_own else [head.head_map.weight]
        if not has_own and token_ids_V is None:
            shared = [target.head_product]
        elif not has_own:
            weights.append(target.head_rows(token_ids_V))
        self._own = [PackedLinear(weight, None) for weight in weights]
        self._products: list[Callable[[Tensor], Tensor]] = [*self._own, *shared]
        self._token_ids_V, self._vocab_size = token_ids_V, target.vocab_size

    @property
    def nbytes(self) -> int:
        ids = 0 if self._token_ids_V is None else self._token_ids_V.nbytes
        return ids + sum(product.nbytes for product in self._own)

    def __call__(self, normed_BTM: Tensor) -> Tensor:
        for product in self._products:
            normed_BTM = product(normed_BTM)
        logits_BTV = normed_BTM
        return logits_BTV if self._token_ids_V is None else spread(logits_BTV, self._token_ids_V, self._vocab_size)


def parts_of(target: Target, head: Eagle3Head, token_ids_V: Tensor | None) -> ChainParts:
    """The head's weights, packed; in the target's dtype and on its device already."""
    shape, own = head.shape, head.layer
    fc, norm, unembed = PackedLinear(head.fc.weight, None), RMSNorm(head.norm), Unembed(target, head, token_ids_V)
    norm_embedded, norm_hidden = RMSNorm(own.input_layernorm), RMSNorm(own.hidden_norm)
    layer = DraftLayer(
        own,
        shape.num_heads,
        LayerShape(shape.num_kv_heads, shape.head_dim),
        PlainRotary(shape.rope_theta, shape.head_dim),
        target.dtype,
    )

    def join_token(embedded_BTM: Tensor, hidden_BTM: Tensor) -> tuple[Tensor, Tensor]:
        normed_BTM = norm_hidden(hidden_BTM)
        residual_BTM = normed_BTM if shape.norm_before_residual else hidden_BTM
        return torch.cat([norm_embedded(embedded_BTM), normed_BTM], -1), residual_BTM

    def logits(hidden_BTM: Tensor) -> Tensor:
        return unembed(norm(hidden_BTM))

    return ChainParts(fc, join_token, layer, logits, layer.nbytes + fc.nbytes + unembed.nbytes)


def build(target: Target, options: Options) -> ChainDrafter:
    checkpoint, head = read_eagle3(options.checkpoint, target)
    layers = config_value(checkpoint, "feature_layers")
    if len(layers) != 3 or not all(0 <= layer <= target.num_layers for layer in layers):
        raise UserError(
            f"{checkpoint.folder}/config.json: feature_layers={layers} must be three layers from 0 to "
            f"{target.num_layers}."
        )
    return ChainDrafter("eagle3", target, tuple(layers), parts_of(target, head, checkpoint.token_ids))
