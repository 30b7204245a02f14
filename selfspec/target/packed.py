"""Linear layers whose weights oneDNN has reordered once, for the CPU: the only place that touches torch's private
operators.

A decoding step reads every weight once, so its speed is how fast weights stream. `F.linear` streams a row-major
matrix at a fraction of the memory bandwidth (and in bfloat16 reorders it again on each call); a weight reordered into
oneDNN's blocked layout streams two to three times faster, and stays nearly as fast for 1 to 8 tokens, which is what
verification needs. torch reaches that layout through `torch.ops.mkldnn._linear_pointwise`, which Inductor uses and
which is private: so every use is here, is checked against `F.linear` when a weight is packed, and falls back to it.

oneDNN chooses the layout for a number of tokens that it is told. Told one token in float32, it leaves the weight
row-major, and a pass over two tokens then costs half as much again as one over a single token (`experiments/LOG.md`);
told a number above one, it blocks it, which is as fast for one token and faster for more. In bfloat16, told one, two
tokens cost little more than one (`experiments/smollm2/speed`).

Cost: packing copies the weight; drop the original if memory matters (`selfspec.target.fused` does, layer by layer).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

PACKED_DTYPES = (torch.float32, torch.bfloat16)
PACKED_FOR_TOKENS = {torch.float32: 16, torch.bfloat16: 1}  # what oneDNN is told that a pass will hold


def packing_available(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch has the operators, for this dtype, on this device; asked by doing it once."""
    if device.type != "cpu" or dtype not in PACKED_DTYPES or not torch.backends.mkldnn.is_available():
        return False
    try:
        probe = torch.linspace(-1, 1, 64 * 32, dtype=dtype).view(64, 32)
        PackedLinear(probe, None, required=True)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return True


class PackedLinear:
    """`x @ weight.T + bias` with the weight `[out, in]` reordered, or plainly where that is not to be had."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, required: bool = False) -> None:
        self.bias_O = None if bias_O is None else bias_O.detach().contiguous()
        self.weight_OI = weight_OI.detach()
        self.packed = False
        try:
            num_tokens = PACKED_FOR_TOKENS.get(weight_OI.dtype, 1)
            packed = torch.ops.mkldnn._reorder_linear_weight.default(self.weight_OI.contiguous(), num_tokens)
            self._linear = torch.ops.mkldnn._linear_pointwise.default
            self._linear_add = torch.ops.mkldnn._linear_pointwise.binary
            _check(self, packed, weight_OI)
            self.weight_OI, self.packed = packed, True
        except (AttributeError, RuntimeError, NotImplementedError):
            if required:
                raise

    @property
    def nbytes(self) -> int:
        tensors = (self.weight_OI, self.bias_O)
        return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors if tensor is not None)

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed:
            return self._linear(x, self.weight_OI, self.bias_O, "none", [], "")
        return F.linear(x, self.weight_OI, self.bias_O)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """`self(x) + residual` in one pass."""
        if self.packed:
            return self._linear_add(x, residual, self.weight_OI, self.bias_O, "add")
        return F.linear(x, self.weight_OI, self.bias_O) + residual


def _check(linear: PackedLinear, packed: Tensor, weight_OI: Tensor) -> None:
    """Once per weight, on two tokens: the private operator must mean what `F.linear` means."""
    x = torch.linspace(-1, 1, 2 * weight_OI.shape[1], dtype=weight_OI.dtype).view(1, 2, -1)
    expected = F.linear(x, weight_OI, linear.bias_O).float()
    residual = torch.ones_like(expected, dtype=weight_OI.dtype)
    got = linear._linear(x, packed, linear.bias_O, "none", [], "").float()
    got_add = linear._linear_add(x, residual, packed, linear.bias_O, "add").float()
    tolerance = (1e-4 if weight_OI.dtype == torch.float32 else 3e-2) * max(float(expected.detach().abs().max()), 1.0)
    if not ((got - expected).abs().max() <= tolerance and (got_add - expected - 1).abs().max() <= tolerance):
        raise RuntimeError("mkldnn._linear_pointwise does not agree with F.linear")
