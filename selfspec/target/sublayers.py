"""A layer without its attention or without its MLP: what a draft that skips sublayers runs.

A layer adds what its attention finds to the residual, then what its MLP makes of that. Left out, a sublayer adds
nothing: its module is replaced by one that returns zeros, in a shallow copy of the layer (no weights are copied, the
layer itself is left alone), and norms that only it reads are passed by. Which modules those are is said once per family
(`selfspec.target.families.Family`); our own fused layers bring their halves themselves. Where attention and MLP add to
the same residual side by side (a parallel residual), skipping one leaves its term out of x + attention(x) + mlp(x).

Skipped attention writes no keys and values: later layers do not miss them, each layer has its own.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from selfspec.target.fused import FusedLayer

if TYPE_CHECKING:
    from selfspec.target.families import Family


class Silent(nn.Module):
    """In the place of an MLP: adds nothing."""

    def forward(self, hidden_states: Tensor, *_args: object, **_kwargs: object) -> Tensor:
        return torch.zeros_like(hidden_states)


class SilentAttention(nn.Module):
    """In the place of an attention module, which returns its weights as well: adds nothing and writes no keys."""

    def forward(self, hidden_states: Tensor, *_args: object, **_kwargs: object) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None


def thinned(
    layers: Sequence[Any], family: Family, skip_attention: Collection[int], skip_mlp: Collection[int]
) -> list[Any | None]:
    """The layers without these sublayers, for `Target.run_layers`; None where nothing is left."""
    kept: list[Any | None] = []
    for index, layer in enumerate(layers):
        no_attention, no_mlp = index in skip_attention, index in skip_mlp
        if no_attention and no_mlp:
            kept.append(None)
        elif isinstance(layer, FusedLayer) and (no_attention or no_mlp):
            kept.append(layer.feed_only if no_attention else layer.attend_only)
        elif no_attention:
            kept.append(_replace(layer, family.attention_parts, SilentAttention()))
        elif no_mlp:
            kept.append(without_mlp(layer, family))
        else:
            kept.append(layer)
    return kept


def without_mlp(layer: nn.Module, family: Family) -> nn.Module:
    """The layer's attention alone, its weights shared with it."""
    return _replace(layer, family.mlp_parts, Silent())


def _replace(layer: nn.Module, parts: Sequence[str], silent: nn.Module) -> nn.Module:
    """A copy whose first part is silent and whose other parts pass on what they get."""
    view = copy.copy(layer)
    assert all(name in layer._modules for name in parts), f"{type(layer).__name__} has no {', '.join(parts)}"
    view._modules = {**layer._modules, parts[0]: silent, **dict.fromkeys(parts[1:], nn.Identity())}
    return view
