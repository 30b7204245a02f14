"""Training a DeepSeek-style multi-token-prediction module, chained: `selfspec.drafters.mtp_module`.

Alignment and unrolled steps are EAGLE-3's (`selfspec.training.unrolled`): position p reads the target's hidden state
of p, then the module's own output, and the token p+1+j; it is labelled with the target's distribution after that token.
The output matrix is the target's, frozen, whole or reduced.

Start: matrices at random. With init=target the layer begins as the target's last one; `eh_proj` selects the hidden
state, and its half that reads the embedding begins small: this trains worse (experiments/LOG.md), presumably since the
module then begins as a prediction of the token that it is given. Norms and shapes are the target's either way.

Checkpoint: config.json (which layer was copied, the target's fingerprint) and model.safetensors: `eh_proj`, `enorm`,
`hnorm`, `layer.*` in the family's own names, `norm`, and `token_ids` of a reduced vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.drafters.mtp_module import MtpModule
from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.training.batches import Batch
from selfspec.training.draft_folder import write_draft
from selfspec.training.draft_vocab import draft_vocabulary
from selfspec.training.evaluate import Validation
from selfspec.training.losses import HeadLoss, head_loss
from selfspec.training.packed import LayerRunner, reduced_head
from selfspec.training.rounds import Slots
from selfspec.training.trainee import check_options
from selfspec.training.unrolled import (
    ChainLoss,
    Step,
    behind_attention,
    draw_weights,
    embedded_steps,
    rotate,
    supervised_steps,
    unroll,
)


@dataclass
class MtpOptions:
    """draft_vocab: a file made by make_data.py, of which the first d_vocab ids can be drafted; null: all tokens."""

    num_steps: int = 3
    decay: float = 0.8
    init: str = "random"  # or target
    draft_vocab: str | None = None
    d_vocab: int | None = None
    seed: int = 0


class MtpTrainee:
    def __init__(self, target: Target, options: MtpOptions, token_ids: Tensor | None) -> None:
        self.target, self.options, self.token_ids = target, options, token_ids
        self.feature_layers: tuple[int, ...] = (target.num_layers,)
        self.num_positions = options.num_steps
        self.copied_layer = target.num_layers - 1
        self.runner = LayerRunner(target)
        layer, norm = self.runner.copy_layer(self.copied_layer), self.runner.copy_norm()
        self.mtp = MtpModule(target.width, getattr(target.config, "rms_norm_eps", 1e-6), layer, norm)
        if options.init == "random":
            draw_weights(self.mtp, options.seed)
        else:
            draw_weights(self.mtp.eh_proj, options.seed)
            with torch.no_grad():
                self.mtp.eh_proj.weight[:, target.width :] = torch.eye(target.width)
        self.head_VM, self.place_V = reduced_head(target, token_ids)
        self.module: nn.Module = self.mtp

    def loss(self, batch: Batch, objective: HeadLoss = head_loss) -> Tensor:
        return self._chain().loss(self._steps(batch), batch, objective)

    def validate(self, batches: Iterable[Batch], greedy: set[int]) -> Validation:
        return self._chain().validate(batches, greedy, self._steps)

    def save(self, folder: Path) -> None:
        config = {
            "kind": "mtp",
            "feature_layer": self.feature_layers[0],
            "hidden": "before_final_norm",
            "copied_layer": self.copied_layer,
            "num_steps": self.options.num_steps,
        }
        write_draft(folder, config, self.module, self.token_ids, self.target)

    @property
    def unrollable(self) -> UnrolledModule:
        return UnrolledModule(self.mtp, self.runner, self.target.layer_shapes[0].head_dim)

    def _chain(self) -> ChainLoss:
        return ChainLoss(self.mtp.norm, self.head_VM, self.place_V, self.options.num_steps, self.options.decay)

    def _states(self, batch: Batch, slots: Slots) -> list[Tensor]:
        """The layer's output `[B, S, M]` after each step, at these positions."""
        assert batch.features_BTF is not None
        embedded = embedded_steps(self.target, batch, self.options.num_steps, slots)
        hidden_BTM, seen_BTT = batch.features_BTF.float(), batch.attention_mask()[:, 0]
        window = self.runner.windows[self.copied_layer]
        return unroll(self.unrollable, hidden_BTM, embedded, batch.positions_BT, seen_BTT, slots, window)

    def _steps(self, batch: Batch) -> list[Step]:
        return supervised_steps(self._states, batch, self.options.num_steps)


@dataclass
class UnrolledModule:
    """The module, cut where attention is."""

    mtp: MtpModule
    runner: LayerRunner
    head_dim: int

    def enter(
        self, embedded_BTM: Tensor, hidden_BTM: Tensor, positions_BT: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mtp, layer = self.mtp, self.mtp.layer
        joined_BTM = mtp.eh_proj(torch.cat([mtp.enorm(embedded_BTM), mtp.hnorm(hidden_BTM)], -1))
        normed_BTM = layer.input_layernorm(joined_BTM)
        attention, heads = layer.self_attn, (-1, self.head_dim)
        query, key, value = (
            projection(normed_BTM).unflatten(-1, heads)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm(query), attention.k_norm(key)
        cos_sin = self.runner.rotary(hidden_BTM, positions_BT)
        return rotate(query, *cos_sin), rotate(key, *cos_sin), value, joined_BTM

    def leave(self, residual_BTM: Tensor, attended_BTHD: Tensor) -> Tensor:
        return behind_attention(self.mtp.layer, residual_BTM, attended_BTHD)


def build_mtp(target: Target, options: dict[str, Any]) -> MtpTrainee:
    """UserError: unknown option, impossible steps, a draft vocabulary of another target or without EOS."""
    check_options("mtp", options, asdict(MtpOptions()))
    typed = MtpOptions(**options)
    if typed.init not in ("target", "random"):
        raise UserError(f"draft.init={typed.init!r} is unknown. Allowed: target, random.")
    if typed.num_steps < 1:
        raise UserError(f"draft.num_steps={typed.num_steps} must be at least 1.")
    token_ids = draft_vocabulary(target, typed.draft_vocab, typed.d_vocab)
    return MtpTrainee(target, typed, token_ids)
