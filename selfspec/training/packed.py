"""A layer of the target's own kind, trained: copied with its weights, run over packed samples without a cache."""

from __future__ import annotations

import copy
from operator import attrgetter

import torch
from torch import Tensor, nn

from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.target.views import module_view
from selfspec.training.batches import Batch

TRAINABLE = ("llama", "mistral", "qwen2", "qwen3")  # one rotary embedding, grouped heads, a layer returns its output


class LayerRunner:
    """Runs decoder layers of the target's family; holds what they need of it (rotary embedding, mask shape)."""

    def __init__(self, target: Target) -> None:
        family = target.family
        if target.config.model_type not in TRAINABLE or family.rotary is None:
            raise UserError(
                f"Layers of model type {target.config.model_type!r} cannot be trained as a draft yet. "
                f"Allowed: {', '.join(TRAINABLE)}. The independent draft can be trained for every target."
            )
        view = module_view(target.hf_model, family.attention)
        self._layers = attrgetter(family.layers)(view)
        self._norm: nn.Module = attrgetter(family.norm)(view)
        self._rotary: nn.Module = attrgetter(family.rotary)(view)
        self.windows = target.windows
        self.queries_per_group = target.queries_per_group

    def copy_layer(self, index: int) -> nn.Module:
        """A trainable float32 copy of one layer."""
        return copy.deepcopy(self._layers[index]).float().requires_grad_(True)

    def copy_norm(self) -> nn.Module:
        return copy.deepcopy(self._norm).float().requires_grad_(True)

    def rotary(self, like_BTM: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin `[B, T, D]`, as the target's own layers are given."""
        cos_BTD, sin_BTD = self._rotary(like_BTM, positions_BT)
        return cos_BTD, sin_BTD

    def run(self, layer: nn.Module, hidden_BTM: Tensor, batch: Batch, window: int | None) -> Tensor:
        """`layer` over a packed batch: attention stays within each sample (and the window, if the layer has one)."""
        mask_B1TT = batch.attention_mask()
        if window is not None:
            behind_BTT = batch.positions_BT[:, :, None] - batch.positions_BT[:, None, :]
            mask_B1TT = mask_B1TT & (behind_BTT < window)[:, None]
        output: Tensor = layer(
            hidden_BTM,
            attention_mask=mask_B1TT.repeat(1, 1, self.queries_per_group, 1),  # as grouped_attention folds its queries
            position_ids=batch.positions_BT,
            position_embeddings=self.rotary(hidden_BTM, batch.positions_BT),
        )
        return output


def reduced_head(target: Target, token_ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The target's frozen head in float32, whole or the rows of `token_ids`, and the place of each id (−1: none)."""
    head_VM = target.head_weight_VM.detach()
    if token_ids is None:
        return head_VM.float(), None
    place_V = torch.full((target.vocab_size,), -1, dtype=torch.int64, device=head_VM.device)
    place_V[token_ids] = torch.arange(len(token_ids), device=head_VM.device)
    return head_VM[token_ids.to(head_VM.device)].float(), place_V
