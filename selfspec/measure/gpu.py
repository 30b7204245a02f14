"""What the GPU protocol is made of: targets that exist nowhere but on the device, and fair timing. What is measured
with it is in `selfspec.measure.gpu_sections`.

Random weights are right for speed, but the best token of such a model is a matter of rounding, and drafts that are
right on paper would be rejected. So here the embedding is scaled up until it decides alone: the next token is certain
(the same again; with an untied head the next id), and only the time is that of the shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from selfspec.decoding import Decoder, Output
from selfspec.decoding.graphs import GraphedRounds
from selfspec.drafters import Drafter, build_drafter
from selfspec.measure.order import balanced
from selfspec.measure.sections import OutOfTime, at_most, one_line
from selfspec.target import Target, load_target

CERTAIN = 512.0  # how much larger the embedding is made; a power of two, so that nothing is rounded
LOADING_S = 60.0  # for the real model
GRAPH_MODES = ("split", "whole")


@dataclass(frozen=True)
class Scale:
    """How much to measure. shapes: label -> conf/target name of random weights."""

    shapes: dict[str, str]
    dtype: str
    prompt_tokens: int
    new_tokens: int
    repeats: int
    bandwidth_bytes: int
    contexts: tuple[int, ...]  # slots that the attention section reads
    memory_rows: int
    memory_tokens: int


SCALES = {
    "full": Scale({"1B": "random-1b", "8B": "random-8b"}, "bfloat16", 128, 96, 7, 1 << 32, (1024, 8192), 8, 4096),
    "tiny": Scale({"tiny": "random-tiny"}, "float32", 8, 8, 2, 1 << 22, (128,), 2, 100),
}


@dataclass
class Bench:
    """The device, what to measure, and the targets loaded so far."""

    device: torch.device
    scale: Scale
    real_model: str | None = None  # conf name or folder of a model with real weights; None: leave it out
    targets: dict[str, Target] = field(default_factory=dict)
    bytes_per_s: float | None = None  # what reading or copying reaches, once measured

    @property
    def modes(self) -> tuple[str, ...]:
        """How rounds can be run here."""
        return ("eager", *GRAPH_MODES) if self.device.type == "cuda" else ("eager",)

    @property
    def labels(self) -> list[str]:
        """The shapes, then the real model."""
        return [*self.scale.shapes, *(["real"] if self.real_model else [])]

    def target(self, label: str, dtype: str | None = None) -> Target:
        """Loaded when first asked for, and kept."""
        dtype = dtype or self.scale.dtype
        key = f"{label} {dtype}"
        if key not in self.targets:
            if label == "real":
                assert self.real_model is not None
                self.targets[key] = load_target(self.real_model, dtype, str(self.device))
            else:
                self.targets[key] = certain_target(self.scale.shapes[label], dtype, self.device)
        return self.targets[key]

    def drafter(self, name: str, target: Target, accept_rate: float = 0.8) -> Drafter | None:
        """early_exit and the layers that a synthetic draft costs: at an eighth of the depth."""
        exit_layer = max(1, target.num_layers // 8)
        if name == "none":
            return None
        if name == "early_exit":
            return build_drafter(name, target, exit_layer=exit_layer)
        if name == "synthetic":
            return build_drafter(name, target, accept_rate=accept_rate, cost_layers=exit_layer)
        return build_drafter(name, target)

    def prompt(self, target: Target, num_tokens: int | None = None, seed: int = 0) -> list[int]:
        """Token ids without meaning."""
        generator = torch.Generator().manual_seed(seed)
        count = num_tokens or self.scale.prompt_tokens
        return torch.randint(0, target.vocab_size, (count,), generator=generator).tolist()


def certain_target(name: str, dtype: str, device: torch.device) -> Target:
    """Random weights of a conf/target shape, made on the device itself, whose next token is certain."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with device if device.type == "cuda" else nullcontext():
            target = load_target(name, dtype, str(device), fused=False)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        embedding = target.hf_model.get_input_embeddings().weight
        head = target.hf_model.get_output_embeddings().weight
        embedding.mul_(CERTAIN)
        if not target.tied:
            head.copy_(embedding.roll(1, 0) / CERTAIN)
    return target


def wide_target(device: torch.device) -> Target:
    """A small model in float32 whose weights are drawn wide: its tokens depend on everything that came before."""
    target = load_target("random-tiny", "float32", str(device), fused=False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in target.hf_model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return target


def add_real_model(bench: Bench, name: str | None) -> str:
    """Takes the model into the bench if it can be loaded here; says what became of it."""
    if not name:
        return "no real model asked for"
    bench.real_model = name
    try:
        with at_most(LOADING_S):
            bench.target("real", "float32")
    except (
        OutOfTime,
        Exception,
    ) as error:  # no network, a missing package: the rest goes on
        bench.real_model = None
        return f"{name} left out: {one_line(error)}"
    return f"{name} is there"


# ---- timing


def interleaved(
    timed: Mapping[str, Callable[[], float]], repeats: int, left: Callable[[], float]
) -> dict[str, list[float]]:
    """What each callable returns, `repeats` times in balanced order (`selfspec.measure.order`), after one warm-up each.

    left: the seconds that are left; when they are over, the repeat that is running is the last (of two at least).
    """
    labels = list(timed)
    for label in labels:
        timed[label]()
    values: dict[str, list[float]] = {label: [] for label in labels}
    for repeat in range(repeats):
        if repeat >= 2 and left() <= 0:
            break
        for label in balanced(labels, repeat):
            values[label].append(timed[label]())
    return values


@dataclass
class Decoding:
    """Called, it decodes and returns the seconds: without the prompt, without capturing. Keeps the last output."""

    decoder: Decoder
    ids: list[int]
    num_tokens: int
    lookahead: int = 4
    output: Output | None = None

    def __call__(self) -> float:
        options: dict[str, Any] = {"max_new_tokens": self.num_tokens, "lookahead": self.lookahead, "ignore_eos": True}
        self.output = self.decoder.decode([self.ids], **options)[0]
        assert len(self.output.token_ids) == self.num_tokens
        return self.output.decode_s

    @property
    def num_rounds(self) -> int:
        """Of the last run, AR's being one per token."""
        assert self.output is not None, "not run yet"
        return len(self.output.rounds)

    @property
    def captures(self) -> dict[str, float]:
        """How many graphs there are, and the seconds that capturing them took."""
        rows = self.decoder.rows
        captured = [] if rows is None else [one for one in rows.rounds.values() if isinstance(one, GraphedRounds)]
        return {
            "number": sum(one.num_captures for one in captured),
            "seconds": sum(one.capture_s for one in captured),
        }


def with_interval(values: list[float]) -> dict[str, float]:
    """Median, and the 95% bootstrap interval of the median."""
    array = np.asarray(values)
    draws = np.random.default_rng(0).choice(array, (2000, len(array)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return {"median": float(np.median(array)), "low": float(low), "high": float(high), "repeats": len(values)}


def share(left: Callable[[], float], num_parts: int) -> Callable[[], float]:
    """What is left of this part's time, when it and `num_parts` - 1 others are still to come."""
    for_others = left() * (1 - 1 / num_parts)
    return lambda: left() - for_others


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Operators(TorchDispatchMode):
    """Counts what is launched: a small model's time on a GPU is the number of its operators, not its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def operators_per_step(target: Target) -> int:
    """Of one token through all layers and the head, views left out."""
    cache = target.make_cache(1, 8)
    zero = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
    with torch.inference_mode(), Operators() as operators:
        hidden = target.run_layers(target.embed(zero), 0, target.num_layers, cache.open(zero, 1))
        target.head(hidden)
    return operators.count
