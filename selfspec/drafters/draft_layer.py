"""What drafts made of one trained decoder layer have in common: the layer, packed, with keys and values of its own.

The layer runs as the target's own do (`selfspec.target.fused`): about 15 operators with weights packed for the CPU, the
same operators on plain weights elsewhere. Its cache has one layer, and slots as the target's: what a round leaves
behind its last token is masked, then overwritten.

Cost of a draft step: the layer's and the head's weights read once, plus about 40 small operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec.cache import KVCache, LayerShape, Pass
from selfspec.cache.storage import kv_bytes_per_slot, slots_for
from selfspec.drafters.checkpoint import Checkpoint
from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.target.blank import blank_layer_and_norm
from selfspec.target.fused import FUSABLE, FusedLayer

if TYPE_CHECKING:
    from selfspec.decoding.rows import Rows

Rotary = Callable[[Pass, Tensor], tuple[Tensor, Tensor]]  # cos and sin of the positions of a pass, in a tensor's dtype


class DraftLayer:
    """One decoder layer, its rotary embedding and its window; keeps nothing of a sequence (see `make_cache`)."""

    def __init__(
        self,
        layer: Any,
        num_heads: int,
        shape: LayerShape,
        rotary: Rotary,
        dtype: torch.dtype,
        window: int | None = None,
    ) -> None:
        self._layer = FusedLayer(layer, num_heads, shape.num_kv_heads, shape.head_dim)
        self._layer.layer_idx = 0  # in its own cache
        self._shape, self._rotary, self._window, self._dtype = shape, rotary, window, dtype
        self._queries_per_group = num_heads // shape.num_kv_heads

    @property
    def nbytes(self) -> int:
        return self._layer.nbytes

    def make_cache(self, rows: Rows) -> KVCache:
        return KVCache([self._shape], rows.num_rows, rows.capacity, self._dtype, rows.device)

    def cache_bytes(self, num_rows: int, capacity: int) -> int:
        return num_rows * slots_for(capacity) * kv_bytes_per_slot([self._shape], self._dtype)

    def __call__(self, hidden_BTM: Tensor, pass_: Pass) -> Tensor:
        """As the target's layers."""
        return self.run(self.norm(hidden_BTM), hidden_BTM, pass_)

    def norm(self, hidden_BTM: Tensor) -> Tensor:
        """The first norm, the layer's own."""
        return self._layer.norm_in(hidden_BTM)

    def run(self, normed_BTX: Tensor, hidden_BTM: Tensor, pass_: Pass) -> Tensor:
        """Attention over `normed_BTX`, which may be wider than the model, and the MLP; the residual is `hidden_BTM`."""
        mask = pass_.mask(self._window, self._queries_per_group, hidden_BTM.dtype)
        return self._layer.run(normed_BTX, hidden_BTM, mask, self._rotary(pass_, hidden_BTM), pass_)


class TrainedNorm(nn.RMSNorm):
    """torch's RMSNorm, with the name that transformers gives its ε."""

    @property
    def variance_epsilon(self) -> float | None:
        return self.eps


class PlainRotary:
    """Rotary embedding of one base frequency, in the half-split form; one table for the longest cache so far."""

    def __init__(self, theta: float, head_dim: int) -> None:
        self.theta, self.head_dim = theta, head_dim
        self._table: tuple[Tensor, Tensor] | None = None

    def __call__(self, pass_: Pass, like: Tensor) -> tuple[Tensor, Tensor]:
        table = self._table
        if table is None or len(table[0]) < pass_.cache.num_slots:
            table = self._table = self._make(pass_.cache.num_slots, like)
        cos_SD, sin_SD = table
        return F.embedding(pass_.positions_BT, cos_SD), F.embedding(pass_.positions_BT, sin_SD)

    def _make(self, num_slots: int, like: Tensor) -> tuple[Tensor, Tensor]:
        half = torch.arange(self.head_dim // 2, device=like.device, dtype=torch.float32) / (self.head_dim // 2)
        angles_SH = torch.arange(num_slots, device=like.device)[:, None] * self.theta**-half
        angles_SD = torch.cat([angles_SH, angles_SH], -1)
        return angles_SD.cos().to(like.dtype), angles_SD.sin().to(like.dtype)


def blank_parts(target: Target, kind: str) -> nn.ModuleDict:
    """`layer` and `norm` of the target's kind, to be filled. UserError where such a layer cannot be run packed."""
    config = target.config
    activation = getattr(config, "hidden_act", "silu")
    if config.model_type not in FUSABLE or activation != "silu":
        raise UserError(
            f"The drafter {kind!r} cannot run a layer of model type {config.model_type!r} with activation "
            f"{activation!r}. Allowed: {', '.join(FUSABLE)} with silu. Drafts for every target: eagle3, independent."
        )
    return blank_layer_and_norm(target)


def target_like(target: Target, layer: Any, like_layer: int) -> DraftLayer:
    """A layer of the target's kind, with the rotary embedding and the window of the target's layer `like_layer`."""
    shape = target.whole_layer_shape
    return DraftLayer(
        layer,
        target.queries_per_group * shape.num_kv_heads,
        shape,
        lambda pass_, like: rotary_of(target, like_layer, pass_, like),
        target.dtype,
        target.windows[like_layer],
    )


def rotary_of(target: Target, index: int, pass_: Pass, like: Tensor) -> tuple[Tensor, Tensor]:
    cos_sin = target.rotary_at(index, pass_, like)
    assert cos_sin is not None, "families that are packed turn their queries and keys"
    return cos_sin


def target_head(target: Target, token_ids_V: Tensor | None) -> tuple[Callable[[Tensor], Tensor], int]:
    """The target's own head behind a norm of the draft's, of all tokens or these; and the bytes of what is copied."""
    if token_ids_V is None:
        return target.unembed, 0
    reduced = target.reduced_unembed(token_ids_V)
    return reduced, reduced.nbytes


def config_value(checkpoint: Checkpoint, name: str) -> Any:
    """UserError where config.json does not say it."""
    if name not in checkpoint.config:
        raise UserError(f"{checkpoint.folder}/config.json lacks {name!r}.")
    return checkpoint.config[name]
