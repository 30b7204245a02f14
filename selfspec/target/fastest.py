"""Which of float32 and bfloat16 this machine is faster in: measured here, since no flag of a CPU says it.

bfloat16 halves the bytes of a decoding step, but only CPUs with AVX-512 or AMX have a packed product for it; elsewhere
(most laptops) it is several times slower than float32, and slower still for the many tokens of training. Measured once
per process, a quarter of a second; what was chosen and why is printed, and `provenance.json` keeps it (`choices_made`).

Decoding is judged by a pass over one token and one over eight (draft and verification) through more weights than the
caches hold, such as float16 holds exactly, as published ones are (float32 then reads no more bytes than bfloat16:
`selfspec.target.packed`); training by a plain product, which is what autocast runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch

from selfspec.target.packed import PackedLinear, packing_available

SHAPE_OI = (1536, 576)  # a matrix of a small model's MLP
NUM_WEIGHTS = 24  # 85 MB in float32, 42 MB in bfloat16
CLEARLY = 0.9  # of float32's time at most: near a tie the more exact one wins


_made: dict[str, str] = {}


@dataclass(frozen=True)
class Choice:
    dtype: torch.dtype
    reason: str


def choices_made() -> dict[str, str]:
    """What this process has chosen, and why: for `decoding` and `training`, where it was asked."""
    return dict(_made)


def fastest_dtype(device: torch.device) -> Choice:
    """The dtype to decode in, when float32's exactness is not asked for."""
    if device.type != "cpu":
        choice = Choice(torch.bfloat16, f"bfloat16 on {device.type}")
    elif not packing_available(torch.bfloat16, device):
        choice = Choice(torch.float32, "float32: this CPU or torch has no packed bfloat16 product")
    else:
        choice = _measured_passes(torch.get_num_threads())
    _made["decoding"] = choice.reason
    return choice


@cache
def _measured_passes(num_threads: int) -> Choice:
    """Cached: asked for again, the answer is the same."""
    with torch.inference_mode():
        passes = {dtype: _a_round(dtype) for dtype in (torch.float32, torch.bfloat16)}
        return _choice(passes, f"one token and eight through {NUM_WEIGHTS} matrices, {num_threads} threads")


def _a_round(dtype: torch.dtype) -> Callable[[], None]:
    weights = [PackedLinear(torch.ones(SHAPE_OI, dtype=dtype), None) for _ in range(NUM_WEIGHTS)]
    inputs = [torch.ones(1, tokens, SHAPE_OI[1], dtype=dtype) for tokens in (1, 8)]

    def run() -> None:
        for x in inputs:
            for weight in weights:
                weight(x)

    return run


def fastest_product(device: torch.device) -> Choice:
    """The dtype in which products over hundreds of tokens are fastest: bfloat16 means that autocast pays."""
    on_cpu = device.type == "cpu"
    choice = _measured_products() if on_cpu else Choice(torch.bfloat16, f"bfloat16 on {device.type}")
    _made["training"] = choice.reason
    return choice


@cache
def _measured_products() -> Choice:
    products = {dtype: _a_product(dtype) for dtype in (torch.float32, torch.bfloat16)}
    return _choice(products, "256 tokens through one matrix")


def _a_product(dtype: torch.dtype) -> Callable[[], object]:
    x, weight = torch.ones(256, SHAPE_OI[1], dtype=dtype), torch.ones(SHAPE_OI, dtype=dtype)
    return lambda: torch.nn.functional.linear(x, weight)


def _choice(timed: Mapping[torch.dtype, Callable[[], object]], what: str, repeats: int = 5) -> Choice:
    """The least of `repeats` interleaved times each, after a first run that does not count."""
    least: dict[torch.dtype, float] = {}
    for repeat in range(repeats + 1):
        for dtype, run in timed.items():
            begin = time.perf_counter()
            run()
            if repeat:
                least[dtype] = min(least.get(dtype, float("inf")), time.perf_counter() - begin)
    half, full = least[torch.bfloat16], least[torch.float32]
    dtype = torch.bfloat16 if half < CLEARLY * full else torch.float32
    name = str(dtype).removeprefix("torch.")
    return Choice(dtype, f"{name}: bfloat16 takes {half / full:.2f} of float32's time here ({what})")
