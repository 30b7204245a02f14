"""EAGLE-3's head (Li et al. 2025, arXiv 2503.01840): one decoder layer over (target features, next token), as a module.

At text position p it reads the target's hidden states of three levels at p, joined by `fc`, and the embedding of token
p+1; it predicts token p+2. In drafting, its own output takes the place of the features it does not have yet.

Parameter names are those of the `speculators` format, without the embedding, which is the target's. The methods are
what training differentiates; decoding runs the same weights packed (`selfspec.drafters.eagle3`).

Shape letters: B rows, T positions, H heads, G kv heads, D head dim, M width, F = 3M features, V reduced vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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


class RMSNorm(nn.RMSNorm):
    """torch's, with the name that transformers gives its ε."""

    @property
    def variance_epsilon(self) -> float | None:
        return self.eps


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
        self.input_layernorm = RMSNorm(shape.width, shape.norm_eps)  # of the embedding
        self.hidden_norm = RMSNorm(shape.width, shape.norm_eps)  # of the features
        self.post_attention_layernorm = RMSNorm(shape.width, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)


class Eagle3Head(nn.Module):
    """`fc` of the features once, then any number of steps; logits are `lm_head(norm(hidden))`."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(3 * shape.width, shape.width, bias=False)
        self.layers = nn.ModuleList([Layer(shape)])
        self.norm = RMSNorm(shape.width, shape.norm_eps)
        self.lm_head = nn.Linear(shape.width, shape.d_vocab, bias=False)

    @property
    def layer(self) -> Layer:
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    @property
    def head_dim(self) -> int:
        return self.shape.head_dim

    def enter(
        self, embedded_BTM: Tensor, hidden_BTM: Tensor, positions_BT: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rotated queries `[B, T, H, D]`, rotated keys and values `[B, T, G, D]` of one step, and the residual."""
        layer, shape = self.layer, self.shape
        joined = torch.cat([layer.input_layernorm(embedded_BTM), layer.hidden_norm(hidden_BTM)], dim=-1)
        heads = (-1, shape.head_dim)
        query = rotate(layer.self_attn.q_proj(joined).unflatten(-1, heads), positions_BT, shape.rope_theta)
        key = rotate(layer.self_attn.k_proj(joined).unflatten(-1, heads), positions_BT, shape.rope_theta)
        return query, key, layer.self_attn.v_proj(joined).unflatten(-1, heads), hidden_BTM

    def leave(self, residual_BTM: Tensor, attended_BTHD: Tensor) -> Tensor:
        """Output projection, residuals and feed-forward; what the next step reads as its features."""
        layer = self.layer
        hidden_BTM = residual_BTM + layer.self_attn.o_proj(attended_BTHD.flatten(-2))
        output: Tensor = hidden_BTM + layer.mlp(layer.post_attention_layernorm(hidden_BTM))
        return output


def rotate(heads_BTHD: Tensor, positions_BT: Tensor, theta: float) -> Tensor:
    """Rotary position embedding, halves convention, as Llama's."""
    half = heads_BTHD.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=heads_BTHD.device, dtype=torch.float32) / half)
    angles = (positions_BT[..., None].float() * frequencies)[:, :, None]
    cos, sin = angles.cos().to(heads_BTHD.dtype), angles.sin().to(heads_BTHD.dtype)
    left, right = heads_BTHD[..., :half], heads_BTHD[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
