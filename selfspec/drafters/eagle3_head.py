"""EAGLE-3's head (Li et al. 2025, arXiv 2503.01840): one decoder layer over (target features, next token), as a module.

At text position p it reads the target's hidden states of three levels at p, joined by `fc`, and the embedding of token
p+1; it predicts token p+2. In drafting, its own output takes the place of the features it does not have yet.

Its output matrix is its own, or, with own_head=False, the target's behind a trained square matrix: logits are
`head_VM (head_map norm(hidden))`, which is an own matrix again once the two are multiplied (`output_matrix`), but a
fifteenth of the weights to train and to store.

Parameter names are those of the `speculators` format, without the embedding, which is the target's. Only weights are
here: decoding runs them packed (`selfspec.drafters.eagle3`), training unrolled (`selfspec.training.eagle3`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec.drafters.checkpoint import Checkpoint, load_into, read_checkpoint
from selfspec.drafters.draft_layer import TrainedNorm, config_value
from selfspec.errors import UserError
from selfspec.target import Target


@dataclass(frozen=True)
class HeadShape:
    width: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float
    d_vocab: int
    norm_before_residual: bool = False  # some published heads add the normed features; ours, as EAGLE's, the plain ones


class Attention(nn.Module):
    """Projections only: queries, keys and values come from [embedding, features], twice the width."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.layer_idx, self.scaling = 0, shape.head_dim**-0.5
        self.q_proj = nn.Linear(2 * shape.width, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * shape.width, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * shape.width, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.width, bias=False)


class FeedForward(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.width, bias=False)

    def forward(self, hidden_BTM: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(hidden_BTM)) * self.up_proj(hidden_BTM))
        return output


class Layer(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = TrainedNorm(shape.width, shape.norm_eps)  # of the embedding
        self.hidden_norm = TrainedNorm(shape.width, shape.norm_eps)  # of the features
        self.post_attention_layernorm = TrainedNorm(shape.width, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)


class Eagle3Head(nn.Module):
    """`fc` of the features once, then any number of steps; logits are `lm_head(norm(hidden))`."""

    def __init__(self, shape: HeadShape, own_head: bool = True) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(3 * shape.width, shape.width, bias=False)
        self.layers = nn.ModuleList([Layer(shape)])
        self.norm = TrainedNorm(shape.width, shape.norm_eps)
        if own_head:
            self.lm_head = nn.Linear(shape.width, shape.d_vocab, bias=False)
        else:
            self.head_map = nn.Linear(shape.width, shape.width, bias=False)

    @property
    def layer(self) -> Layer:
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer


def read_eagle3(path: str | Path, target: Target) -> tuple[Checkpoint, Eagle3Head]:
    """The draft in the folder. UserError: none there, or another target's, or weights that do not fit."""
    checkpoint = read_checkpoint(path, "eagle3", target)
    own_head, given = checkpoint.config.get("own_head", True), config_value(checkpoint, "shape")
    try:
        shape = HeadShape(**given)
    except TypeError as error:
        raise UserError(f"{checkpoint.folder}/config.json: shape is not an eagle3 head's ({error}).") from error
    with torch.device("meta"):
        head = Eagle3Head(shape, own_head)
    load_into(head, checkpoint)
    return checkpoint, head


def output_matrix(head: Eagle3Head, target: Target, token_ids_V: Tensor | None) -> Tensor:
    """`[V, M]`: its own, or the target's, of all tokens or these, times the head's map (multiplied in float32)."""
    if hasattr(head, "lm_head"):
        return head.lm_head.weight.detach()
    product_VM = target.head_rows(token_ids_V).float() @ head.head_map.weight.detach().float()
    return product_VM.to(head.head_map.weight.dtype)
