"""Linear layers whose weights were laid out once for the CPU: the only place that touches torch's private operators.

A decoding step reads every weight once, so its speed is how fast weights stream. `F.linear` streams a row-major matrix
at a fraction of the memory bandwidth (and in bfloat16 reorders it again on each call). Two libraries inside torch do
better, and are little slower for the few tokens of a verification than for one:

- **FBGEMM, weights in float16, everything else in float32** (`HalfWeights`): half the bytes of a float32 pass, and its
  result up to the rounding of sums. Published weights are bfloat16 or float16, and float16 holds those exactly, but for
  bfloat16 below 2^-17, which it rounds by at most 2^-25. Taken for a float32 weight of which float16 loses no more than
  float32's sums do (`exact_in_half`). Its kernels take six tokens at once: seven cost clearly more. One token, two, and
  three or more are summed in three orders, so that a token's last digits depend on how many are run with it.
- **oneDNN, weights in blocks** (`Blocked`), for bfloat16 and for all other float32. It chooses the blocks for a number
  of tokens that it is told. Told one token in float32, it leaves the weight row-major, and a pass over two tokens then
  costs half as much again as one over a single token; told more, it blocks it, which is as fast for one token and
  faster for more. In bfloat16, told one, two tokens cost little more than one (`experiments/smollm2/speed`).

Both are private (quantized Linear and Inductor use them): so every use is here, is checked against `F.linear` when a
weight is packed, and falls back to it. What they bring was measured: `experiments/LOG.md`.

Cost: packing copies the weight; drop the original if memory matters (`selfspec.target.fused` does, layer by layer). It
takes about as long as reading the weights from a warm disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

PACKED_DTYPES = (torch.float32, torch.bfloat16)
PACKED_FOR_TOKENS = {torch.float32: 16, torch.bfloat16: 1}  # what oneDNN is told that a pass will hold
FLOAT32_ROUNDING = 2.0**-24  # a float32's rounding at most, over the number
LOOKED_AT_ONCE = 2**21  # numbers of a matrix that is looked through, so that no second one of its size is made

UNUSABLE = (AttributeError, RuntimeError, NotImplementedError)  # what a missing or changed operator raises


def packing_available(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch has oneDNN's operators, for this dtype, on this device; asked by doing it once."""
    if device.type != "cpu" or dtype not in PACKED_DTYPES or not torch.backends.mkldnn.is_available():
        return False
    try:
        probe = torch.linspace(-1, 1, 64 * 32, dtype=dtype).view(64, 32)
        _checked(Blocked, probe, None)
    except UNUSABLE:
        return False
    return True


def exact_in_half(weight_OI: Tensor) -> bool:
    """Whether float16 holds the weight as well as float32 needs it: what it loses of any row, and of any column (which
    may meet inputs far larger than the others), is no more than float32 loses, on average, in summing a row's products.
    """
    pieces = weight_OI.split(max(1, LOOKED_AT_ONCE // max(weight_OI.shape[1], 1)))
    return all(map(_is_held, pieces)) or _loses_little(pieces)


def _is_held(piece_OI: Tensor) -> bool:
    half_OI = piece_OI.half()
    return torch.equal(half_OI.float(), piece_OI) and bool(half_OI.isfinite().all())


def _loses_little(pieces: Sequence[Tensor]) -> bool:
    """By sums of squares, in float64, which neither overflow nor underflow."""
    inputs = pieces[0].shape[1]
    at_most = inputs * FLOAT32_ROUNDING**2
    lost_I, all_I = torch.zeros(2, inputs, dtype=torch.float64)
    for rows_OI in pieces:
        exact_OI, half_OI = rows_OI.double(), rows_OI.half().double()
        lost_OI, all_OI = (half_OI - exact_OI).square_(), exact_OI.square_()
        if not bool((lost_OI.sum(1) <= at_most * all_OI.sum(1)).all()):  # NaN, or infinite as float16: not exact
            return False
        lost_I += lost_OI.sum(0)
        all_I += all_OI.sum(0)
    return bool((lost_I <= at_most * all_I).all())


class PackedLinear:
    """`x @ weight.T + bias` with the weight `[out, in]` packed, or plainly where that is not to be had."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        weight_OI, bias_O = weight_OI.detach(), None if bias_O is None else bias_O.detach().contiguous()
        self._product = _first_usable(weight_OI, bias_O)

    @property
    def layout(self) -> str:
        """'half', 'blocked' or 'plain'."""
        return self._product.layout

    @property
    def nbytes(self) -> int:
        """What a pass reads."""
        return self._product.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """`self(x) + residual`."""
        return self._product.plus(x, residual)


class Plain:
    """`F.linear`."""

    layout = "plain"

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.weight_OI, self.bias_O = weight_OI, bias_O

    @property
    def nbytes(self) -> int:
        return self.weight_OI.numel() * self.weight_OI.dtype.itemsize + _nbytes(self.bias_O)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_OI, self.bias_O)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        return self(x) + residual


class Blocked(Plain):
    """oneDNN's product; the residual is added in the same operator."""

    layout = "blocked"

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        num_tokens = PACKED_FOR_TOKENS.get(weight_OI.dtype, 1)
        reorder = torch.ops.mkldnn._reorder_linear_weight.default
        super().__init__(reorder(weight_OI.contiguous(), num_tokens), bias_O)
        self._linear = torch.ops.mkldnn._linear_pointwise.default
        self._linear_add = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x, self.weight_OI, self.bias_O, "none", [], "")

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._linear_add(x, residual, self.weight_OI, self.bias_O, "add")


class HalfWeights:
    """FBGEMM's product of float32 with float16, summed in float32."""

    layout = "half"

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.nbytes = torch.float16.itemsize * weight_OI.numel() + _nbytes(bias_O)
        self._packed = torch.ops.quantized.linear_prepack_fp16.default(weight_OI.contiguous(), bias_O)
        self._linear = torch.ops.quantized.linear_dynamic_fp16.default._op  # without a look at each argument in Python

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x, self._packed)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._linear(x, self._packed).add_(residual)


LAYOUTS: tuple[type[HalfWeights] | type[Plain], ...] = (HalfWeights, Blocked, Plain)


def _nbytes(bias_O: Tensor | None) -> int:
    return 0 if bias_O is None else bias_O.nbytes


def _first_usable(weight_OI: Tensor, bias_O: Tensor | None) -> Any:
    layouts: list[Any] = []
    if weight_OI.device.type == "cpu" and weight_OI.dtype in PACKED_DTYPES:
        half = weight_OI.dtype == torch.float32 and exact_in_half(weight_OI)
        layouts = [HalfWeights, Blocked] if half else [Blocked]
    for layout in layouts:
        try:
            return _checked(layout, weight_OI, bias_O)
        except UNUSABLE:
            continue
    return Plain(weight_OI, bias_O)


def _checked(layout: Any, weight_OI: Tensor, bias_O: Tensor | None) -> Any:
    """The weight so packed, tried once on two tokens: a private operator must mean what `F.linear` means."""
    product = layout(weight_OI, bias_O)
    x = torch.linspace(-1, 1, 2 * weight_OI.shape[1], dtype=weight_OI.dtype).view(1, 2, -1)
    expected = F.linear(x, weight_OI, bias_O).float()
    got = product(x).float()
    got_add = product.plus(x, torch.ones_like(expected, dtype=weight_OI.dtype)).float()
    tolerance = (1e-4 if weight_OI.dtype == torch.float32 else 3e-2) * max(float(expected.abs().max()), 1.0)
    if not ((got - expected).abs().max() <= tolerance and (got_add - expected - 1).abs().max() <= tolerance):
        raise RuntimeError(f"the {layout.layout} product does not agree with F.linear")
    return product
