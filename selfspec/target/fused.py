"""Llama-class layers as a handful of operators: one matrix for q, k and v, one for gate and up, residuals added in
place.

On a small model a decoding step on the CPU is weights streaming plus the cost of launching operators; transformers'
layer launches about 45 per token, this one 15, and its weights are packed (`selfspec.target.packed`). The layer is
called like transformers' own, so `Target` does not know the difference. Written from the architecture, not from
transformers' code: RMSNorm, rotary position embedding in the half-split form, grouped attention, SwiGLU (Llama,
Mistral, Qwen2 with its q/k/v biases, Qwen3 with its q/k norms).

Shape letters: B rows, T positions, M width, H query heads, G kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec.cache import Pass
from selfspec.target.packed import PackedLinear, packing_available
from selfspec.target.weights import parameter_bytes

if TYPE_CHECKING:
    from selfspec.target.stack import Target

FUSABLE = ("llama", "mistral", "qwen2", "qwen3")


class FusedLayer:
    """One decoder layer. Holds packed copies of its weights; the module it was made from may be dropped."""

    def __init__(self, layer: Any, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        attention = layer.self_attn
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.layer_idx: int = attention.layer_idx
        self.scaling: float = attention.scaling
        self.qkv = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = _joined(attention.o_proj)
        self.mlp = FusedMLP(layer) if hasattr(layer.mlp, "gate_proj") else None  # a draft's layer may have none
        self.norm_in = RMSNorm(layer.input_layernorm)
        self.eps: float = layer.input_layernorm.variance_epsilon
        self.norm_q = attention.q_norm.weight.detach() if hasattr(attention, "q_norm") else None
        self.norm_k = attention.k_norm.weight.detach() if hasattr(attention, "k_norm") else None
        self.turns = Turns(num_heads + num_kv_heads, num_kv_heads, head_dim, self.norm_in.weight)

    @property
    def nbytes(self) -> int:
        """Packed weights; the norms stay where they are."""
        return self.qkv.nbytes + self.out.nbytes + (self.mlp.nbytes if self.mlp else 0)

    def __call__(
        self,
        hidden_BTM: Tensor,
        attention_mask: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        cache: Pass,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """As transformers' layers are called; `attention_mask` is the pass's own, `[B, 1, R*T, S]`."""
        return self.feed(self.attend_only(hidden_BTM, attention_mask, position_embeddings, cache))

    def run(
        self,
        normed_BTX: Tensor,
        hidden_BTM: Tensor,
        attention_mask: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        cache: Pass,
    ) -> Tensor:
        """The layer behind its first norm: queries, keys and values come from `normed_BTX`, which a draft's layer has
        wider than the model; the residual is `hidden_BTM`.
        """
        return self.feed(self.attend(normed_BTX, hidden_BTM, attention_mask, position_embeddings, cache))

    def attend_only(
        self,
        hidden_BTM: Tensor,
        attention_mask: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        cache: Pass,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """The layer without its MLP, called like the layer."""
        return self.attend(self.norm_in(hidden_BTM), hidden_BTM, attention_mask, position_embeddings, cache)

    def feed_only(self, hidden_BTM: Tensor, **_as_the_layer: object) -> Tensor:
        """The layer without its attention, called like the layer: no keys are written."""
        return self.feed(hidden_BTM)

    def attend(
        self,
        normed_BTX: Tensor,
        hidden_BTM: Tensor,
        attention_mask: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        cache: Pass,
    ) -> Tensor:
        """The residual with what attention adds."""
        rows, width, _ = hidden_BTM.shape
        heads, groups, dim = self.num_heads, self.num_kv_heads, self.head_dim
        rotary = cache.once("rotary_qkv", lambda: self.turns(*position_embeddings))
        qkv_BTXD = self.qkv(normed_BTX).view(rows, width, heads + 2 * groups, dim)
        if self.norm_q is not None:
            query, key, value = qkv_BTXD.split([heads, groups, groups], 2)
            query, key = rms_norm(query, self.norm_q, self.eps), rms_norm(key, self.norm_k, self.eps)
            qkv_BTXD = torch.cat([query, key, value], 2)
        qkv_BTXD = rotate(qkv_BTXD, *rotary)
        key_BGSD, value_BGSD = cache.write(self.layer_idx, qkv_BTXD[:, :, heads:])
        query_BGXD = qkv_BTXD[:, :, :heads].transpose(1, 2).reshape(rows, groups, heads // groups * width, dim)
        attended = F.scaled_dot_product_attention(
            query_BGXD, key_BGSD, value_BGSD, attn_mask=attention_mask, scale=self.scaling
        )
        attended_BTX = attended.reshape(rows, heads, width, dim).transpose(1, 2).reshape(rows, width, heads * dim)
        return self.out.plus(attended_BTX, hidden_BTM)

    def feed(self, hidden_BTM: Tensor) -> Tensor:
        """The residual with what the MLP adds."""
        return hidden_BTM if self.mlp is None else self.mlp(hidden_BTM)


class FusedMLP:
    """The second half of a layer, with its norm."""

    def __init__(self, layer: Any) -> None:
        self.gate_up = _joined(layer.mlp.gate_proj, layer.mlp.up_proj)
        self.down = _joined(layer.mlp.down_proj)
        self.norm = RMSNorm(layer.post_attention_layernorm)

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes

    def __call__(self, hidden_BTM: Tensor) -> Tensor:
        """The residual with what the MLP adds."""
        gate_BTI, up_BTI = self.gate_up(self.norm(hidden_BTM)).chunk(2, -1)
        return self.down.plus(F.silu(gate_BTI).mul_(up_BTI), hidden_BTM)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, the mean in float32."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


class RMSNorm:
    """RMSNorm in few kernels. In float32 through the length |x|: sqrt(mean(x²) + eps) = sqrt(|x|² + M eps) / sqrt(M).
    In half precision, which would round |x|, through LayerNorm's kernel: (x, −x) has mean 0 and variance mean(x²).
    """

    def __init__(self, norm: Any) -> None:
        weight = norm.weight.detach()
        self.width, self.eps = len(weight), norm.variance_epsilon
        self.by_length = weight.dtype.itemsize >= torch.float32.itemsize
        self.weight = weight * self.width**0.5 if self.by_length else torch.cat([weight, weight])
        self.least_length = torch.tensor((self.width * self.eps) ** 0.5, dtype=weight.dtype, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        if self.by_length:
            length = torch.linalg.vector_norm(x, 2, -1, True).hypot_(self.least_length)
            return (x * self.weight).div_(length)
        both = torch.cat([x, x.neg()], -1)
        return torch.layer_norm(both, (2 * self.width,), self.weight, None, self.eps)[..., : self.width]


def rotate(x_BTXD: Tensor, cos_BTXD: Tensor, signed_sin_BTXD: Tensor) -> Tensor:
    """Rotary embedding: x·cos + rotate_half(x)·sin, the sign of rotate_half moved into the sine."""
    return torch.addcmul(x_BTXD * cos_BTXD, x_BTXD.roll(x_BTXD.shape[-1] // 2, -1), signed_sin_BTXD)


class Turns:
    """transformers' cos and sin `[B, T, D]` for queries, keys and values in one tensor, as `rotate` wants them:
    `[B, T, X, D]` each, X = num_rotated + num_values heads. Values are turned by nothing.
    """

    def __init__(self, num_rotated: int, num_values: int, head_dim: int, like: Tensor) -> None:
        heads_X1 = torch.arange(num_rotated + num_values, device=like.device)[:, None]
        self.turned_X1 = heads_X1 < num_rotated
        sign_D = torch.ones(head_dim, dtype=like.dtype, device=like.device)
        sign_D[: head_dim // 2] = -1
        self.sign_XD = self.turned_X1 * sign_D

    def __call__(self, cos_BTD: Tensor, sin_BTD: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(self.turned_X1, cos_BTD[:, :, None], 1), sin_BTD[:, :, None] * self.sign_XD


def fuse(target: Target, reload: Callable[[], Any] | None = None) -> bool:
    """Replace the target's layers and head by fused, packed ones where that is possible; says whether it was.

    With `reload` the original weights are released as they are packed (they are in memory once, except a tied
    embedding, whose rows are looked up and whose packed copy is the head), and `target.hf_model` loads them again
    when asked for.
    """
    if target.config.model_type not in FUSABLE or getattr(target.config, "hidden_act", "silu") != "silu":
        return False
    if not packing_available(target.dtype, target.device):
        return False
    _ = target.fingerprint  # while its weights are there
    shape = target.layer_shapes[0]
    num_heads = target.queries_per_group * shape.num_kv_heads
    fused = []
    for layer in target.layers:
        fused.append(FusedLayer(layer, num_heads, shape.num_kv_heads, shape.head_dim))
        if reload is not None:
            for module in layer.modules():
                if isinstance(module, nn.Linear):
                    _release(module)
    head = _joined(target.head_module)
    if reload is not None and not target.tied:
        _release(target.head_module)
    packed_bytes = head.nbytes + sum(layer.nbytes for layer in fused)
    target.set_layers(fused, head, parameter_bytes(target.hf_model) + packed_bytes, packed_bytes)
    if reload is not None:
        target.release_model(reload)
    return True


def _release(linear: Any) -> None:
    """Free a plain linear layer's weights, in the model it belongs to as well."""
    for name, parameter in list(linear.named_parameters(recurse=False)):
        setattr(linear, name, nn.Parameter(parameter.new_empty(0), requires_grad=False))


def _joined(*linears: nn.Linear) -> PackedLinear:
    """Several projections of the same input as one matrix product."""
    weight = (
        torch.cat([linear.weight.detach() for linear in linears]) if len(linears) > 1 else linears[0].weight.detach()
    )
    biases = [linear.bias for linear in linears]
    bias = None if biases[0] is None else torch.cat([b.detach() for b in biases])
    return PackedLinear(weight, bias)
