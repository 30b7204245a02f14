"""The sections of the GPU protocol: each fills a dict, in an order in which little is lost if it is cut short.

A speed is a median with a 95% interval, a ratio is paired within interleaved repeats. Whole rounds against the other
two ways show what launching costs; synthetic acceptance against the cost model shows whether rounds cost what they
should; autoregressive decoding against the measured bandwidth shows what is left to gain.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from selfspec.cache import Contiguous, kv_bytes_per_slot
from selfspec.decoding import Decoder
from selfspec.decoding.budget import call_of, estimate_call
from selfspec.decoding.capture import CudaRecorder
from selfspec.decoding.sampler import Sampler as RoundSampler
from selfspec.measure import cost_model
from selfspec.measure.gpu import (
    Bench,
    Decoding,
    interleaved,
    operators_per_step,
    share,
    synchronize,
    wide_target,
    with_interval,
)
from selfspec.measure.sections import attempt
from selfspec.measure.speed import interleaved as timed_calls
from selfspec.measure.speed import ratio
from selfspec.sampling import Sampling, build_rule, build_transforms
from selfspec.target import Target
from selfspec.target.attention import attention_backends, fold, grouped_attention

Left = Callable[[], float]  # seconds that are left to the section
DRAFTERS = ("none", "early_exit", "ngram", "synthetic")
SAMPLED = Sampling(temperature=0.9, top_p=0.95)
RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "rejection": {"sampling": SAMPLED},
    "coupled": {"sampling": SAMPLED, "acceptance": "coupled"},
}
ACCEPT_RATES = (0.6, 0.7, 0.8, 0.9)
LOOKAHEAD = 4
ATTENTION_ERROR = 0.03  # of the largest number, in bfloat16


def correctness(bench: Bench, result: dict[str, Any], left: Left) -> None:
    """Float32: the tokens are the same in every mode, and at temperature 0 those of `generate`."""
    for label in ("small", "real") if bench.real_model else ("small",):
        attempt(result, label, partial(_equal_tokens, bench, label))


def _equal_tokens(bench: Bench, label: str, part: dict[str, Any]) -> None:
    target = wide_target(bench.device) if label == "small" else bench.target("real", "float32")
    prompts = [bench.prompt(target, count, seed=count) for count in (9, 1, 70, 30)]
    count = 4 * bench.scale.new_tokens // 3
    expected = [target.hf_generate(ids, count, Sampling()).token_ids for ids in prompts]
    part |= {"compared": 0, "different": []}
    for drafter in DRAFTERS:
        for rule, options in RULES.items():
            if drafter == "synthetic" and rule == "rejection":
                continue  # its tokens cannot be known beforehand
            reference = expected if rule == "greedy" else None
            for mode in bench.modes:
                decoder = Decoder(target, bench.drafter(drafter, target), 2, rounds=mode)
                outputs = decoder.decode(prompts, max_new_tokens=count, lookahead=3, ignore_eos=True, seed=1, **options)
                tokens = [output.token_ids for output in outputs]
                reference = tokens if reference is None else reference
                part["compared"] += len(tokens)
                if tokens != reference:
                    part["different"].append(f"{drafter}, {rule}, {mode}")
    assert not part["different"], f"tokens differ: {'; '.join(part['different'])}"


def bandwidth(bench: Bench, result: dict[str, Any], left: Left) -> None:
    """Bytes per second of reading (a sum) and of copying (read and written) far more than the caches hold."""
    numbers = torch.ones(bench.scale.bandwidth_bytes // 4, dtype=torch.float32, device=bench.device)
    copy = torch.empty_like(numbers)
    seconds = timed_calls({"read": numbers.sum, "copy": lambda: copy.copy_(numbers)}, 9, bench.device)
    result["read_bytes_per_s"] = numbers.nbytes / min(seconds["read"])
    result["copy_bytes_per_s"] = 2 * numbers.nbytes / min(seconds["copy"])
    bench.bytes_per_s = max(result["read_bytes_per_s"], result["copy_bytes_per_s"])


def autoregressive(bench: Bench, result: dict[str, Any], left: Left) -> None:
    """Plain decoding by every target: tokens/s, bytes read per second, and their share of the bandwidth."""
    if bench.bytes_per_s is None:
        bandwidth(bench, {}, left)
    for number, label in enumerate(bench.labels):
        time_left = share(left, len(bench.labels) - number)
        attempt(result, label, partial(_autoregressive, bench, label, time_left))


def _autoregressive(bench: Bench, label: str, left: Left, part: dict[str, Any]) -> None:
    target, count = bench.target(label), bench.scale.new_tokens
    ids, bytes_per_s = bench.prompt(target), bench.bytes_per_s
    assert bytes_per_s is not None, "measured before"
    timed: dict[str, Callable[[], float]] = {
        mode: Decoding(Decoder(target, None, rounds=mode), ids, count) for mode in bench.modes
    }
    timed["generate"] = partial(_generate_s, target, ids, count)
    kv_bytes = kv_bytes_per_slot(target.layer_shapes, target.dtype)
    part["bytes_per_step"] = target.step_bytes + (len(ids) + count // 2) * kv_bytes
    part["limit_tokens_per_s"] = bytes_per_s / part["bytes_per_step"]
    part["operators_per_step"] = operators_per_step(target)
    for mode, seconds in interleaved(timed, bench.scale.repeats, left).items():
        rates = with_interval([count / s for s in seconds])
        reached = rates["median"] * part["bytes_per_step"]
        part[mode] = {"tokens_per_s": rates, "bytes_per_s": reached, "share_of_bandwidth": reached / bytes_per_s}
    long = bench.prompt(target, 8 * bench.scale.prompt_tokens)
    decoder = Decoder(target, None)
    prefill_s = [decoder.decode([long], max_new_tokens=1, ignore_eos=True)[0].prefill_s for _ in range(3)]
    part["prompt_tokens_per_s"] = len(long) / min(prefill_s)


def _generate_s(target: Target, ids: list[int], count: int) -> float:
    """Of transformers' own loop, the prompt and the first token left out."""
    output = target.hf_generate(ids, count, Sampling())
    return (output.total_s - output.ttft_s) * count / max(count - 1, 1)


def attention(bench: Bench, result: dict[str, Any], left: Left) -> None:
    """torch's attention kernels on folded queries over the cache: which runs, and how fast each could be."""
    for label in bench.scale.shapes:
        target = bench.target(label)
        for context in bench.scale.contexts:
            for width in (1, LOOKAHEAD + 1):
                name = f"{label}, {width} over {context}"
                attempt(result, name, partial(_attend, bench, target, context, width))


def _attend(bench: Bench, target: Target, context: int, width: int, part: dict[str, Any]) -> None:
    cache = target.make_cache(1, context - 1)
    shape, heads = target.layer_shapes[0], target.config.num_attention_heads
    query = torch.randn(1, heads, width, shape.head_dim, dtype=target.dtype, device=bench.device)
    cache.storage.normal_()
    with torch.inference_mode():
        mask = cache.open(torch.full((1, width), context - 2, device=bench.device), context).mask(
            None, target.queries_per_group, target.dtype
        )
        views = [cache.visible(layer, slice(None), context) for layer in range(target.num_layers)]
        part["chosen"], possible = attention_backends(query, *views[0], mask)
        expected = plain_attention(query, *views[0], mask)
        num_bytes = cache.kv_bytes

        def all_layers() -> None:
            for keys, values in views:
                grouped_attention(target.layers[0], query, keys, values, mask)

        for backend in possible:
            with sdpa_kernel([getattr(SDPBackend, backend)]) if bench.device.type == "cuda" else nullcontext():
                run: Callable[[], None] = all_layers
                if bench.device.type == "cuda":
                    (graph,) = CudaRecorder(bench.device).record([all_layers]).graphs
                    run = graph.replay
                seconds = min(timed_calls({backend: run}, 5, bench.device)[backend])
                got, _ = grouped_attention(target.layers[0], query, *views[0], mask)
            error = float((got.float() - expected).abs().max() / expected.abs().max())
            part[backend] = {"us_per_layer": 1e6 * seconds / len(views), "bytes_per_s": num_bytes / seconds}
            part[backend]["off_by"] = error
            assert error < ATTENTION_ERROR, f"{backend} is off by {error:.3f} of the largest number"


def plain_attention(query_BHTD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, mask: Tensor) -> Tensor:
    """softmax(q·kᵀ/√D + mask)·v in float32, `[B, T, H, D]`: what every kernel has to compute."""
    rows, num_heads, width, head_dim = query_BHTD.shape
    scores = fold(query_BHTD.float(), key_BGSD.shape[1]) @ key_BGSD.float().transpose(-1, -2) * head_dim**-0.5
    out = (scores + mask.float()).softmax(-1) @ value_BGSD.float()
    return out.reshape(rows, num_heads, width, head_dim).transpose(1, 2)


def rounds(bench: Bench, result: dict[str, Any], left: Left) -> None:
    """Every drafter in every mode, interleaved: what launching from Python costs, and what two graphs cost."""
    labels = list(dict.fromkeys([bench.labels[0], bench.labels[-1]]))
    for number, label in enumerate(labels):
        time_left = share(left, len(labels) - number)
        for position, name in enumerate(DRAFTERS):
            part_left = share(time_left, len(DRAFTERS) - position)
            attempt(result, f"{label}, {name}", partial(_modes, bench, label, name, part_left))


def _modes(bench: Bench, label: str, name: str, left: Left, part: dict[str, Any]) -> None:
    target, count = bench.target(label), bench.scale.new_tokens
    ids, best = bench.prompt(target), bench.modes[-1]
    timed = {
        mode: Decoding(Decoder(target, bench.drafter(name, target), rounds=mode), ids, count, LOOKAHEAD)
        for mode in bench.modes
    }
    seconds = interleaved(timed, bench.scale.repeats, left)
    part["tokens_per_s"] = {mode: with_interval([count / s for s in values]) for mode, values in seconds.items()}
    part[f"speedup_of_{best}_over"] = {mode: ratio(seconds[mode], seconds[best]) for mode in bench.modes[:-1]}
    part["tau"] = count / timed[best].num_rounds
    part["captures"] = timed[best].captures


def synthetic(bench: Bench, result: dict[str, Any], left: Left) -> None:
    """Measured speedup at a set acceptance, against the cost model with the measured costs c and v."""
    for number, label in enumerate(bench.scale.shapes):
        time_left = share(left, len(bench.scale.shapes) - number)
        attempt(result, label, partial(_against_model, bench, label, time_left))


def _against_model(bench: Bench, label: str, left: Left, part: dict[str, Any]) -> None:
    """c and v from rounds of two lengths in which every draft is accepted; then nothing is fitted any more."""
    target, count, mode = bench.target(label), bench.scale.new_tokens, bench.modes[-1]
    ids = bench.prompt(target)
    timed = {"ar": Decoding(Decoder(target, None, rounds=mode), ids, count)}
    for rate, num_drafted in ((1.0, LOOKAHEAD), (1.0, 2 * LOOKAHEAD), *((rate, LOOKAHEAD) for rate in ACCEPT_RATES)):
        decoder = Decoder(target, bench.drafter("synthetic", target, rate), rounds=mode)
        timed[f"{rate} K={num_drafted}"] = Decoding(decoder, ids, count, num_drafted)
    seconds = interleaved(timed, bench.scale.repeats, left)
    round_s = {key: float(np.median(seconds[key])) / timed[key].num_rounds for key in timed}
    step_s, short, long = round_s["ar"], round_s[f"1.0 K={LOOKAHEAD}"], round_s[f"1.0 K={2 * LOOKAHEAD}"]
    part["step_ms"] = 1e3 * step_s
    part["c"] = (long - short) / LOOKAHEAD / step_s
    part["v"] = short / step_s - LOOKAHEAD * part["c"]
    for rate in ACCEPT_RATES:
        key = f"{rate} K={LOOKAHEAD}"
        tau = count / timed[key].num_rounds
        part[str(rate)] = {
            "speedup": ratio(seconds["ar"], seconds[key]),
            "model": cost_model.speedup([rate] * LOOKAHEAD, part["c"], part["v"]),
            "model_at_measured_tau": tau / cost_model.round_cost(LOOKAHEAD, part["c"], part["v"]),
            "tau": tau,
            "expected_tau": cost_model.expected_tau([rate] * LOOKAHEAD),
        }


def memory(bench: Bench, result: dict[str, Any], left: Left) -> None:
    """What a call with several rows allocates at most, against the estimate made before."""
    for label in bench.scale.shapes:
        for name in ("none", "early_exit"):
            attempt(result, f"{label}, {name}", partial(_memory, bench, label, name))


def _memory(bench: Bench, label: str, name: str, part: dict[str, Any]) -> None:
    target, scale = bench.target(label), bench.scale
    drafter = bench.drafter(name, target)
    num_drafted = 0 if drafter is None else LOOKAHEAD
    prompts = [bench.prompt(target, scale.prompt_tokens, seed) for seed in range(scale.memory_rows)]
    needs = [scale.memory_tokens] * scale.memory_rows
    sampler = RoundSampler(build_transforms(SAMPLED), build_rule("auto", SAMPLED))
    decoder = Decoder(target, drafter, scale.memory_rows, capacity=scale.memory_tokens)
    call = call_of(target, Contiguous(), scale.memory_rows, needs, num_drafted + 1, sampler, scale.prompt_tokens)
    expected = estimate_call(target, decoder.drafter, call)
    part["estimated_bytes"] = expected.allocated_bytes
    part["estimated_kv_bytes"] = expected.kv_bytes
    part["weight_bytes"] = target.weight_bytes
    on_cuda = bench.device.type == "cuda"
    if on_cuda:  # what cuBLAS allocates once per stream belongs to no call
        Decoder(target, drafter, 2).decode(prompts[:2], max_new_tokens=4, lookahead=LOOKAHEAD, sampling=SAMPLED)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(bench.device)
        before = torch.cuda.memory_allocated(bench.device)
    decoder.decode(prompts, max_new_tokens=scale.new_tokens, lookahead=LOOKAHEAD, sampling=SAMPLED, ignore_eos=True)
    synchronize(bench.device)
    assert decoder.rows is not None
    part["kv_bytes"] = decoder.rows.cache.kv_bytes
    if on_cuda:
        part["peak_bytes"] = torch.cuda.max_memory_allocated(bench.device) - before
        part["reserved_bytes"] = torch.cuda.memory_reserved(bench.device)
        part["estimate_over_measured"] = part["estimated_bytes"] / part["peak_bytes"]
    assert part["kv_bytes"] == part["estimated_kv_bytes"], "the cache is not what the formula says"


SECTIONS: dict[str, tuple[Callable[[Bench, dict[str, Any], Left], None], float]] = {  # and the most seconds it may take
    "bandwidth": (bandwidth, 20),
    "correctness": (correctness, 90),
    "autoregressive": (autoregressive, 110),
    "rounds": (rounds, 90),
    "synthetic": (synthetic, 80),
    "memory": (memory, 30),
    "attention": (attention, 30),
}
