"""What speculation can be worth: bytes per step, the time they take, and the speedup that follows. No torch.

At batch 1 a decoding step reads every weight and every cached key and value once, and that reading is its time:

    bytes = layers * (layer + context * kv) + head          step_s = bytes / (bandwidth * efficiency)

A round of K drafts costs K*c + v steps, where c is a draft's cost and v that of verifying, in autoregressive steps
(Leviathan et al. 2023, section 3.3, where v = 1). With a_i the chance that draft i is accepted when all before it were,

    tau = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_K             = (1 - a^(K+1)) / (1 - a)  where all a_i = a
    S   = tau / (K*c + v)

An early exit at E verifies only the layers above E, but also runs its last draft through the layers below: together
that is one whole step, so v = 1 holds for it as for any other draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from selfspec.config import RandomShape
from selfspec.errors import UserError


@dataclass(frozen=True)
class Stack:
    """A model as what a step reads of it, in bytes. kv: keys and values of one token in one layer."""

    num_layers: int
    layer_bytes: int
    head_bytes: int
    kv_bytes: int

    def step_bytes(self, context: int, num_layers: int | None = None, head_share: float = 1.0) -> float:
        """Read for one token behind `context` others by the first `num_layers` (None: all) and a part of the head."""
        layers = self.num_layers if num_layers is None else num_layers
        return layers * (self.layer_bytes + context * self.kv_bytes) + head_share * self.head_bytes

    def draft_cost(self, context: int, exit_layer: int, head_share: float = 1.0) -> float:
        """c of an early exit: what its step reads, over what a whole step reads. head_share: d_vocab / vocabulary."""
        return self.step_bytes(context, exit_layer, head_share) / self.step_bytes(context)


def llama_stack(shape: RandomShape, itemsize: int = 2) -> Stack:
    """Llama-class layers of this shape, norms left out: q, k, v and o projections; gate, up and down; keys, values."""
    head_dim = shape.head_dim or shape.hidden_size // shape.num_heads
    queries, keys = shape.num_heads * head_dim, shape.num_kv_heads * head_dim
    weights = shape.hidden_size * (2 * queries + 2 * keys + 3 * shape.intermediate_size)
    return Stack(
        num_layers=shape.num_layers,
        layer_bytes=itemsize * weights,
        head_bytes=itemsize * shape.hidden_size * shape.vocab_size,
        kv_bytes=itemsize * 2 * keys,
    )


def step_s(num_bytes: float, bytes_per_s: float, efficiency: float = 1.0) -> float:
    """Seconds to read that many bytes. efficiency: the share of the bandwidth that is reached."""
    return num_bytes / (bytes_per_s * efficiency)


def expected_tau(acceptance: Sequence[float]) -> float:
    """Tokens per round, bonus or correction token included. acceptance[i]: draft i+1 is accepted, given all before."""
    tau, reached = 1.0, 1.0
    for chance in acceptance:
        if not 0 <= chance <= 1:
            raise UserError(f"acceptance={chance} is not possible: it is a probability, 0 to 1.")
        reached *= chance
        tau += reached
    return tau


def round_cost(num_drafted: int, c: float, v: float = 1.0) -> float:
    """In autoregressive steps."""
    return num_drafted * c + v


def speedup(acceptance: Sequence[float], c: float, v: float = 1.0) -> float:
    """S over autoregressive decoding in the same engine."""
    return expected_tau(acceptance) / round_cost(len(acceptance), c, v)


def best_lookahead(alpha: float, c: float, v: float = 1.0, most: int = 16) -> tuple[int, float]:
    """K in 1..most with the largest speedup at a constant chance of acceptance, and that speedup."""
    speedups = [speedup([alpha] * num_drafted, c, v) for num_drafted in range(1, most + 1)]
    best = max(range(most), key=speedups.__getitem__)
    return best + 1, speedups[best]


def break_even_alpha(num_drafted: int, c: float, v: float = 1.0) -> float | None:
    """The constant chance of acceptance at which K drafts a round cost what they bring; None: they never pay.

    tau grows with alpha from 1 to K+1, so there is at most one; for K = 1 and v = 1 it is c itself.
    """
    if num_drafted < 1:
        raise UserError(f"num_drafted={num_drafted} is not possible: allowed is 1 or more.")
    cost = round_cost(num_drafted, c, v)
    if cost > num_drafted + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tau([middle] * num_drafted) < cost else (low, middle)
    return high
