"""Randomness as a function: every number is a hash of (seed, request, position, stream, index), nothing is remembered.

So a row's noise does not depend on the batch it is in, its place there, or how many tokens were drafted before, and it
is the same on every device: int64 arithmetic that wraps is exact everywhere. The hash is SplitMix64 (Steele, Lea and
Flood 2014; finaliser of Stafford's variant 13) applied twice: first over (seed, request), then over the packed counter
position:32 | stream:8 | index:24.

Cost: `uniforms` about 25 kernels on tiny tensors (0.05 ms on CPU); `gumbel` about 16 passes over [B, T, V]: 2.6 ms for
[1, 9, 49152] on one CPU core. Capturable in a CUDA graph (pass the seed as a tensor to change it between replays).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GAMMA = 0x9E3779B97F4A7C15
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB
CPU_PIECE = 1 << 16

STREAM_DRAFT, STREAM_VERIFY, STREAM_TREE, STREAM_GUMBEL = range(4)


@dataclass(frozen=True)
class NoiseKey:
    """Which noise a round uses: position_B is the absolute position of the round's first drafted token.

    It is unique per request, because every round emits at least one token. `step` i of the draft is at position_B + i.
    """

    seed: int | Tensor
    request_B: Tensor
    position_B: Tensor
    step: int = 0


def uniforms(
    seed: int | Tensor, request_B: Tensor, position_B: Tensor, stream: int, n: int, first_index: int = 0
) -> Tensor:
    """float64 [B, n], strictly inside (0, 1), with 52 random bits each."""
    index_n = torch.arange(first_index, first_index + n, device=request_B.device)
    counter_Bn = (position_B[:, None] << 32) + ((stream << 24) + index_n)
    bits_Bn = _mix(_request_key(seed, request_B)[:, None] + counter_Bn * _signed(GAMMA))
    return (_shift_right(bits_Bn, 12).double() + 0.5) * 2.0**-52


def gumbel(seed: int | Tensor, request_B: Tensor, position_BT: Tensor, vocab_size: int) -> Tensor:
    """float32 [B, T, V] standard Gumbel noise, a function of (seed, request, absolute position, token id) alone.

    -log(E) with E = -log1p(-w), w in (0, 1) from 54 bits: relative precision holds at small E, which decides races
    won by unlikely tokens. The hash is bitwise equal on all devices, the two logarithms to the last place.
    """
    assert vocab_size <= 1 << 24, "the counter gives 24 bits to the token id"
    steps_V = torch.arange(vocab_size, device=request_B.device) * _signed(GAMMA)
    base_BT = _request_key(seed, request_B)[:, None] + ((position_BT << 32) + (STREAM_GUMBEL << 24)) * _signed(GAMMA)
    rows_R1 = base_BT.reshape(-1, 1)
    # on CPU in pieces that stay in the cache: four times faster than passes over the whole
    piece = max(1, CPU_PIECE // vocab_size) if request_B.device.type == "cpu" else max(1, rows_R1.shape[0])
    pieces = [_gumbel_of_bits(_mix(rows + steps_V)) for rows in rows_R1.split(piece)]
    return torch.cat(pieces).reshape(*position_BT.shape, vocab_size)


def _gumbel_of_bits(bits: Tensor) -> Tensor:
    w = _shift_right(bits, 10).bitwise_or_(1).float().mul_(2.0**-54).clamp_(max=1 - 2.0**-24)
    return w.neg_().log1p_().neg_().log_().neg_()


def _request_key(seed: int | Tensor, request_B: Tensor) -> Tensor:
    if isinstance(seed, Tensor):
        return _mix(_mix(seed.to(torch.int64) + _signed(GAMMA)) + (request_B + 1) * _signed(GAMMA))
    return _mix((request_B + 1) * _signed(GAMMA) + _signed(splitmix64(seed)))


def splitmix64(state: int) -> int:
    """The first output of SplitMix64 from this state, on the host: the reference for `_mix`."""
    z = (state + GAMMA) % 2**64
    z = (z ^ (z >> 30)) * MULTIPLIER_1 % 2**64
    z = (z ^ (z >> 27)) * MULTIPLIER_2 % 2**64
    return z ^ (z >> 31)


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place on a fresh tensor; int64 multiplication wraps, as it must."""
    z = z.bitwise_xor_(_shift_right(z, 30)).mul_(_signed(MULTIPLIER_1))
    z = z.bitwise_xor_(_shift_right(z, 27)).mul_(_signed(MULTIPLIER_2))
    return z.bitwise_xor_(_shift_right(z, 31))


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's int64 shift copies the sign bit."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
