"""Training EAGLE-3's head: soft labels of the target on a reduced vocabulary, unrolled over `num_steps` drafts.

Alignment (the trap of published code): position p reads features of p and token p+1, and is labelled with the target's
distribution after token p+1, step j with that after p+1+j; `selfspec.training.rounds` says where rounds begin. Tokens
are the text's own (teacher-forced), hidden states the head's own.

Loss: Σ_j decay^j × the loss of step j (`selfspec.training.losses`), p renormalised on the draft vocabulary.

Start: with init=target the layer begins as the target's last one on its highest features (the half of its doubled input
that reads the embedding begins small, and `fc` selects), with the target's final norm; the output matrix begins as the
target's in any case, its own or behind a map.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.drafters.eagle3_head import Eagle3Head, HeadShape
from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.training.batches import Batch
from selfspec.training.draft_folder import write_draft
from selfspec.training.draft_vocab import draft_vocabulary
from selfspec.training.evaluate import Validation
from selfspec.training.losses import HeadLoss, head_loss
from selfspec.training.packed import TRAINABLE, LayerRunner, reduced_head
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
class Eagle3Options:
    """draft_vocab: a file made by make_data.py, of which the first d_vocab ids can be drafted; null: all tokens.
    own_head: an output matrix of its own, which begins as the target's; else the target's, behind a trained map.
    """

    feature_layers: tuple[int, int, int] | None = None  # null: 2, L/2, L−3, as published
    intermediate_size: int | None = None  # null: the target's
    num_steps: int = 3
    own_head: bool = True
    decay: float = 0.8
    init: str | None = None  # target | random; null: target where it has a layer of this kind
    draft_vocab: str | None = None
    d_vocab: int | None = None
    seed: int = 0


class Eagle3Trainee:
    def __init__(self, target: Target, options: Eagle3Options, token_ids: Tensor | None) -> None:
        self.target, self.options, self.token_ids = target, options, token_ids
        layers = options.feature_layers or (2, target.num_layers // 2, target.num_layers - 3)
        self.feature_layers: tuple[int, ...] = tuple(layers)
        self.num_positions = options.num_steps
        self.head_VM, self.place_V = reduced_head(target, token_ids)
        config, shape = target.config, target.layer_shapes[0]
        rope = getattr(config, "rope_parameters", None) or {}
        self.head = Eagle3Head(
            HeadShape(
                width=target.width,
                intermediate_size=options.intermediate_size
                or getattr(config, "intermediate_size", None)
                or 4 * target.width,
                num_heads=config.num_attention_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                rope_theta=float(rope.get("rope_theta", 10000.0)),
                norm_eps=getattr(config, "rms_norm_eps", 1e-6),
                d_vocab=len(self.head_VM),
            ),
            options.own_head,
        )
        draw_weights(self.head, options.seed)
        with torch.no_grad():
            if options.own_head:
                self.head.lm_head.weight.copy_(self.head_VM.cpu())
            else:
                self.head.head_map.weight.copy_(torch.eye(target.width))
        if options.init != "random" and can_begin_as_target(target, self.head, options.init):
            begin_as_target(self.head, LayerRunner(target), target.num_layers - 1)
        self.module: nn.Module = self.head

    def loss(self, batch: Batch, objective: HeadLoss = head_loss) -> Tensor:
        return self._chain().loss(self._steps(batch), batch, objective)

    def validate(self, batches: Iterable[Batch], greedy: set[int]) -> Validation:
        return self._chain().validate(batches, greedy, self._steps)

    def save(self, folder: Path) -> None:
        config = {
            "kind": "eagle3",
            "feature_layers": list(self.feature_layers),
            "shape": asdict(self.head.shape),
            "num_steps": self.options.num_steps,
            "own_head": self.options.own_head,
        }
        write_draft(folder, config, self.module, self.token_ids, self.target)

    def _chain(self) -> ChainLoss:
        head, options = self.head, self.options
        if options.own_head:
            return ChainLoss(head.norm, head.lm_head.weight, self.place_V, options.num_steps, options.decay)
        mapped = nn.Sequential(head.norm, head.head_map)
        return ChainLoss(mapped, self.head_VM, self.place_V, options.num_steps, options.decay)

    @property
    def unrollable(self) -> UnrolledHead:
        return UnrolledHead(self.head)

    def _states(self, batch: Batch, slots: Slots) -> list[Tensor]:
        """The head's output `[B, S, M]` after each step, at these positions."""
        assert batch.features_BTF is not None
        features_BTM = self.head.fc(batch.features_BTF.float())
        embedded = embedded_steps(self.target, batch, self.options.num_steps, slots)
        return unroll(self.unrollable, features_BTM, embedded, batch.positions_BT, batch.attention_mask()[:, 0], slots)

    def _steps(self, batch: Batch) -> list[Step]:
        return supervised_steps(self._states, batch, self.options.num_steps)


@dataclass
class UnrolledHead:
    """The head's layer, cut where attention is."""

    head: Eagle3Head

    @property
    def head_dim(self) -> int:
        return self.head.shape.head_dim

    def enter(
        self, embedded_BTM: Tensor, hidden_BTM: Tensor, positions_BT: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        layer, shape = self.head.layer, self.head.shape
        normed_BTM = layer.hidden_norm(hidden_BTM)
        joined = torch.cat([layer.input_layernorm(embedded_BTM), normed_BTM], dim=-1)
        half = torch.arange(shape.head_dim // 2, device=positions_BT.device, dtype=torch.float32)
        angles = positions_BT[..., None].float() * shape.rope_theta ** (-half / len(half))
        angles = torch.cat([angles, angles], -1)
        attention, heads = layer.self_attn, (-1, shape.head_dim)
        query = rotate(attention.q_proj(joined).unflatten(-1, heads), angles.cos(), angles.sin())
        key = rotate(attention.k_proj(joined).unflatten(-1, heads), angles.cos(), angles.sin())
        residual_BTM = normed_BTM if shape.norm_before_residual else hidden_BTM
        return query, key, attention.v_proj(joined).unflatten(-1, heads), residual_BTM

    def leave(self, residual_BTM: Tensor, attended_BTHD: Tensor) -> Tensor:
        return behind_attention(self.head.layer, residual_BTM, attended_BTHD)


def can_begin_as_target(target: Target, head: Eagle3Head, init: str | None) -> bool:
    """Whether the target's last layer has the shape of the head's. UserError where that was asked for."""
    same_mlp = head.shape.intermediate_size == getattr(target.config, "intermediate_size", None)
    if target.config.model_type in TRAINABLE and same_mlp:
        return True
    if init == "target":
        raise UserError(
            f"draft.init=target needs a target of type {', '.join(TRAINABLE)} (given: {target.config.model_type}) and "
            f"its intermediate_size ({head.shape.intermediate_size} here). Use draft.init=random."
        )
    return False


@torch.no_grad()
def begin_as_target(head: Eagle3Head, runner: LayerRunner, index: int) -> None:
    """Weights of the target's layer `index`; `fc` hands it the last of the features as they are."""
    source: Any = runner.copy_layer(index)
    norm: Any = runner.copy_norm()
    layer, width = head.layer, head.shape.width
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(layer.self_attn, name).weight[:, width:] = getattr(source.self_attn, name).weight
    layer.self_attn.o_proj.weight.copy_(source.self_attn.o_proj.weight)
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(layer.mlp, name).weight.copy_(getattr(source.mlp, name).weight)
    layer.hidden_norm.weight.copy_(source.input_layernorm.weight)
    layer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight)
    head.norm.weight.copy_(norm.weight)
    head.fc.weight.zero_()
    head.fc.weight[:, -width:] = torch.eye(width)


def build_eagle3(target: Target, options: dict[str, Any]) -> Eagle3Trainee:
    """UserError: unknown option, impossible layers or steps, a draft vocabulary of another target or without EOS."""
    check_options("eagle3", options, asdict(Eagle3Options()))
    typed = Eagle3Options(**options)
    layers = typed.feature_layers
    if layers is not None and (len(layers) != 3 or not all(0 <= layer <= target.num_layers for layer in layers)):
        raise UserError(f"draft.feature_layers={list(layers)} must be three layers from 0 to {target.num_layers}.")
    if target.num_layers < 4 and layers is None:
        raise UserError(f"{target.name} has {target.num_layers} layers; give draft.feature_layers yourself.")
    if typed.init not in (None, "target", "random"):
        raise UserError(f"draft.init={typed.init!r} is unknown. Allowed: target, random, or null.")
    if typed.intermediate_size is not None and typed.intermediate_size < 1:
        raise UserError(f"draft.intermediate_size={typed.intermediate_size} must be at least 1, or null: the target's.")
    if typed.num_steps < 1:
        raise UserError(f"draft.num_steps={typed.num_steps} must be at least 1.")
    token_ids = draft_vocabulary(target, typed.draft_vocab, typed.d_vocab)
    return Eagle3Trainee(target, typed, token_ids)
