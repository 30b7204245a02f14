"""How long a pass takes on a machine that is not at hand: the larger of reading and computing, plus what devices say to
each other. A prediction; everything that a real machine does beside these three is left out.

One pass over T = rows * positions tokens, N devices under tensor parallelism (Shoeybi et al. 2019: every matrix split):

    bytes  = itemsize * (L * (layer + touched experts) + head) + rows * context * kv       read once, however large T is
    flops  = 2 * T * (L * (layer + k experts of n) + head) + 4 * T * context * heads * head_dim * L
    link_s = 2 L * (latency + 2 (N−1)/N * T * width * itemsize / link)    all-reduces, behind attention and MLP
    pass_s = max(bytes / N / (bandwidth * share), flops / N / (peak * share)) + link_s

Of n routed experts, of which each token takes k, a pass over T tokens touches n * (1 − (1 − k/n)^T) on average, taking
tokens as independent: for mixtures of experts verification is *not* nearly free. kv heads that N does not divide are
held more than once. Williams et al. 2009 (roofline); Pope et al. 2023 (inference at scale).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from selfspec.config import allowed
from selfspec.errors import UserError

if TYPE_CHECKING:
    from selfspec.target.shape import ModelShape

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


@dataclass
class Hardware:
    """One device and its link to the next: conf/hardware."""

    name: str
    memory_bytes: float
    bytes_per_s: float
    flops_per_s: dict[str, float]
    link_bytes_per_s: float
    link_latency_s: float


@dataclass(frozen=True)
class Machine:
    """`num_devices` of one kind. The shares say how much of the data sheet is reached."""

    hardware: Hardware
    num_devices: int = 1
    dtype: str = "bfloat16"
    bandwidth_share: float = 0.8
    compute_share: float = 0.6

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE or self.dtype not in self.hardware.flops_per_s:
            known = [name for name in self.hardware.flops_per_s if name in ITEMSIZE]
            raise UserError(f"dtype={self.dtype!r} has no rate for {self.hardware.name}. {allowed(self.dtype, known)}")
        if self.num_devices < 1:
            raise UserError(f"num_devices={self.num_devices} is not possible: allowed is 1 or more.")
        for name in ("bandwidth_share", "compute_share"):
            if not 0 < getattr(self, name) <= 1:
                raise UserError(f"{name}={getattr(self, name)} is not possible: allowed is above 0, up to 1.")
        rates = {f"flops_per_s.{self.dtype}": self.hardware.flops_per_s[self.dtype]}
        rates |= {name: getattr(self.hardware, name) for name in ("memory_bytes", "bytes_per_s", "link_bytes_per_s")}
        for name, rate in rates.items():
            if not 0 < rate < math.inf:
                raise UserError(f"hardware.{name}={rate} is not possible: allowed is above 0. See conf/hardware.")
        if not 0 <= self.hardware.link_latency_s < math.inf:
            raise UserError(
                f"hardware.link_latency_s={self.hardware.link_latency_s} is not possible: allowed is 0 or more."
            )


def touched_experts(model: ModelShape, num_tokens: int) -> float:
    """How many experts of a layer a pass over so many tokens reads, on average."""
    if not model.num_experts:
        return 0.0
    return model.num_experts * (1 - (1 - model.experts_per_token / model.num_experts) ** num_tokens)


def kv_bytes_per_token(model: ModelShape, machine: Machine) -> float:
    """Keys and values of one token in one layer, over all devices; heads that the devices do not divide are copied."""
    heads = max(model.num_kv_heads, machine.num_devices) if machine.num_devices > 1 else model.num_kv_heads
    return ITEMSIZE[machine.dtype] * 2 * heads * model.head_dim


def memory_bytes(model: ModelShape, machine: Machine, rows: int, context: int) -> float:
    """Weights and cache on one device."""
    params = model.num_layers * (model.layer_params + model.expert_params)
    params += model.head_params * (1 if model.tied else 2)
    cache = rows * context * model.num_layers * kv_bytes_per_token(model, machine)
    return (ITEMSIZE[machine.dtype] * params + cache) / machine.num_devices


def pass_s(
    model: ModelShape,
    machine: Machine,
    rows: int,
    context: int,
    width: int = 1,
    num_layers: int | None = None,
    head_share: float = 1.0,
) -> float:
    """Seconds of one pass over `width` positions of every row, through the first `num_layers` (None: all) and a part of
    the head.
    """
    layers = model.num_layers if num_layers is None else num_layers
    itemsize, tokens = ITEMSIZE[machine.dtype], rows * width
    one_expert = model.expert_params / model.num_experts if model.num_experts else 0.0
    read_params = layers * (model.layer_params + touched_experts(model, tokens) * one_expert)
    read = itemsize * (read_params + head_share * model.head_params)
    read += rows * context * layers * kv_bytes_per_token(model, machine)
    used_params = layers * (model.layer_params + model.experts_per_token * one_expert) + head_share * model.head_params
    flops = 2 * tokens * used_params + 4 * tokens * context * model.num_heads * model.head_dim * layers
    device = machine.hardware
    busy_s = max(
        read / (device.bytes_per_s * machine.bandwidth_share),
        flops / (device.flops_per_s[machine.dtype] * machine.compute_share),
    )
    return busy_s / machine.num_devices + link_s(model, machine, tokens, layers)


def link_s(model: ModelShape, machine: Machine, tokens: int, layers: int) -> float:
    """Seconds of the all-reduces of so many layers (ring: 2 (N−1)/N of the message over each link)."""
    if machine.num_devices == 1:
        return 0.0
    message = tokens * model.width * ITEMSIZE[machine.dtype]
    over_link = 2 * (machine.num_devices - 1) / machine.num_devices * message / machine.hardware.link_bytes_per_s
    return 2 * layers * (machine.hardware.link_latency_s + over_link)


def one_layer_head(model: ModelShape) -> ModelShape:
    """A drafting head of EAGLE's size: one dense layer of the target's shape on 2 M inputs, and the target's head."""
    dense = model.layer_params + model.expert_params * (
        model.experts_per_token / model.num_experts if model.num_experts else 0.0
    )
    return replace(
        model,
        num_layers=1,
        layer_params=dense + 2 * model.width**2,
        expert_params=0.0,
        num_experts=0,
        experts_per_token=0,
    )
