"""How close the engine comes to its limit: own AR against plain `generate`, verification by width, bytes per second.

Everything is timed in one process, interleaved in balanced order, and reported as medians and as ratios within a
repeat, with a bootstrap interval: absolute times on a shared machine mean little, ratios within one minute do.
The limit: a pass reads every weight once and multiplies it with every token, so it cannot be faster than bytes over
read bandwidth, nor than operations over the rate of large products (`pass_limit`). Where the second is the larger, more
tokens cost more in proportion, and no engine can make verification flat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from selfspec.config import GenerateConfig
from selfspec.decoding import decode
from selfspec.decoding.stopwatch import Stopwatch
from selfspec.drafters import build_drafter
from selfspec.measure.order import balanced
from selfspec.target import Target
from selfspec.target.fastest import SHAPE_OI
from selfspec.target.packed import LAYOUTS, UNUSABLE, Blocked, PackedLinear, Plain

Timed = Callable[[], object]


@dataclass
class SpeedConfig(GenerateConfig):
    """experiments/speed.py."""

    repeats: int = 9
    prompt_tokens: int = 64
    widths: list[int] = field(default_factory=lambda: [1, 2, 4, 5, 8, 9, 16, 17, 32])
    dtypes: list[str] = field(default_factory=lambda: ["float32", "bfloat16"])
    exit_layer: int | None = None  # for the share of time outside draft and verify; null: 2/3 of the layers
    out: str | None = None  # a folder for speed.json and speed.md


def interleaved(timed: Mapping[str, Timed], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each callable, `repeats` times each, in balanced order, after one warm-up."""
    labels = list(timed)
    for label in labels:
        timed[label]()
    seconds: dict[str, list[float]] = {label: [] for label in labels}
    stopwatch = Stopwatch(device)
    for repeat in range(repeats):
        for label in balanced(labels, repeat):
            begin = stopwatch.now()
            timed[label]()
            seconds[label].append(stopwatch.now() - begin)
    return seconds


def ratio(numerator: Sequence[float], denominator: Sequence[float], seed: int = 0) -> dict[str, float]:
    """Median of the ratios within each repeat, and its 95% bootstrap interval."""
    ratios = np.asarray(numerator) / np.asarray(denominator)
    draws = np.random.default_rng(seed).choice(ratios, (2000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return {"ratio": float(np.median(ratios)), "low": float(low), "high": float(high)}


def read_bandwidth(device: torch.device, megabytes: int = 256) -> float:
    """Bytes per second of summing a tensor far larger than the caches: what reading weights can hope for."""
    numbers = torch.ones(megabytes * 2**18, dtype=torch.float32, device=device)
    seconds = interleaved({"read": numbers.sum}, 7, device)["read"]
    return numbers.nbytes / min(seconds)


def product_rate(device: torch.device, dtype: torch.dtype, size: int = 1024) -> float:
    """Operations per second of a large matrix product: what a pass over many tokens can hope for."""
    make = partial(torch.ones, dtype=dtype, device=device)
    weight, x = make(size, size), make(1, size, size)
    ways = {"plain": partial(torch.nn.functional.linear, x, weight), "packed": partial(PackedLinear(weight, None), x)}
    with torch.inference_mode():
        seconds = interleaved(ways, 7, device)
    return 2 * size**3 / min(min(of_one) for of_one in seconds.values())


def pass_limit(target: Target, width: int, bandwidth: float, rate: float) -> float:
    """Seconds that a pass over `width` tokens takes at least: every weight is read once, and multiplied with each of
    them. Attention over the cache and everything else is left out, so that no engine can be below it.
    """
    return max(target.step_bytes / bandwidth, 2 * target.step_weights * width / rate)


def generation(targets: Mapping[str, Target], config: SpeedConfig) -> dict[str, Timed]:
    """Every way of generating `max_new_tokens` tokens: plain HF in each dtype, dynamic and static cache, and our AR."""
    ids = _prompt(next(iter(targets.values())), config.prompt_tokens)
    timed: dict[str, Timed] = {}
    for dtype, target in targets.items():
        timed[f"HF generate {dtype}"] = _hf(target, ids, config.max_new_tokens)
        timed[f"HF generate {dtype}, static cache"] = _hf(
            target, ids, config.max_new_tokens, cache_implementation="static", disable_compile=True
        )
        timed[f"own AR {dtype}"] = _own(target, ids, config.max_new_tokens)
    return timed


def _hf(target: Target, ids: list[int], count: int, **options: Any) -> Timed:
    input_ids = torch.tensor([ids], device=target.device)
    options |= {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count, "eos_token_id": None}

    def run() -> None:
        with torch.inference_mode():
            mask = torch.ones_like(input_ids)
            out = target.hf_model.generate(input_ids, attention_mask=mask, pad_token_id=0, **options)
        assert out.shape[1] == len(ids) + count

    return run


def _own(target: Target, ids: list[int], count: int) -> Timed:
    def run() -> None:
        assert len(decode(target, None, [ids], max_new_tokens=count, ignore_eos=True)[0].token_ids) == count

    return run


def verify_cost(target: Target, config: SpeedConfig) -> dict[int, dict[str, float]]:
    """Per width T: milliseconds of one target pass over T tokens, and its ratio to a pass over one."""
    ids = torch.tensor([_prompt(target, config.prompt_tokens)], device=target.device)
    cache = target.make_cache(1, config.prompt_tokens + max(config.widths))

    def a_pass(width: int, first: int) -> Timed:
        def run() -> None:
            with torch.inference_mode():
                pass_ = cache.open(torch.arange(first, first + width, device=target.device)[None], first + width)
                hidden = target.run_layers(target.embed(ids[:, :width]), 0, target.num_layers, pass_)
                target.head(hidden).amax()

        return run

    with torch.inference_mode():
        a_pass(config.prompt_tokens, 0)()
    timed = {str(width): a_pass(width, config.prompt_tokens) for width in config.widths}
    seconds = interleaved(timed, 5 * config.repeats, target.device)
    one = seconds[str(config.widths[0])]
    return {
        width: {"ms": 1e3 * float(np.median(seconds[str(width)])), **ratio(seconds[str(width)], one)}
        for width in config.widths
    }


def layout_costs(config: SpeedConfig) -> dict[str, dict[int, dict[str, float]]]:
    """Per layout of `selfspec.target.packed` and width T: milliseconds of T tokens through 212 MB of float32 weights,
    which float16 holds, and the ratio to oneDNN's blocks (to `F.linear` where there are none) at the same width.
    """
    made = torch.Generator().manual_seed(0)
    weights = [torch.randn(SHAPE_OI, generator=made).bfloat16().float() for _ in range(60)]
    products = {}
    for layout in LAYOUTS:
        try:
            products[layout.layout] = [layout(weight, None) for weight in weights]
        except UNUSABLE:  # not on this machine
            continue

    def through(layout: str, width: int) -> Timed:
        x = torch.ones(1, width, SHAPE_OI[1])

        def run() -> None:
            with torch.inference_mode():
                for product in products[layout]:
                    product(x)

        return run

    timed = {f"{layout} {width}": through(layout, width) for width in config.widths for layout in products}
    seconds = interleaved(timed, 2 * config.repeats, torch.device("cpu"))
    base = Blocked.layout if Blocked.layout in products else Plain.layout
    return {
        layout: {
            width: {
                "ms": 1e3 * float(np.median(seconds[f"{layout} {width}"])),
                **ratio(seconds[f"{layout} {width}"], seconds[f"{base} {width}"]),
            }
            for width in config.widths
        }
        for layout in products
    }


def round_shares(target: Target, config: SpeedConfig) -> dict[str, dict[str, float]]:
    """Per drafter: the share of a round's time in drafting, in verification and outside both."""
    ids = _prompt(target, config.prompt_tokens)
    exit_layer = config.exit_layer or 2 * target.num_layers // 3
    drafters = {
        "none": None,
        f"early_exit E={exit_layer}": build_drafter("early_exit", target, exit_layer=exit_layer),
        "ngram": build_drafter("ngram", target),
    }
    shares = {}
    for label, drafter in drafters.items():
        for _ in range(2):  # the first is the warm-up
            rounds = decode(
                target,
                drafter,
                [ids],
                max_new_tokens=config.max_new_tokens,
                lookahead=config.lookahead,
                ignore_eos=True,
            )[0].rounds
        draft, verify, other = (
            float(np.median([getattr(record, name) for record in rounds]))
            for name in ("draft_s", "verify_s", "other_s")
        )
        total = draft + verify + other
        shares[label] = {"draft": draft / total, "verify": verify / total, "other": other / total, "ms": 1e3 * total}
    return shares


def _prompt(target: Target, count: int) -> list[int]:
    """Token ids of no meaning: what is measured here is speed alone."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, target.vocab_size, (count,), generator=generator).tolist()
