"""The engine's speed table: plain HF generate, our AR, verification by width, time outside draft and verify, bytes/s.

    python experiments/speed.py target=smollm2-135m out=experiments/smollm2/speed

Synthetic input (random token ids): this measures speed, not acceptance.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.markdown import Markdown

from selfspec import load_target
from selfspec.config import resolve
from selfspec.measure import speed
from selfspec.provenance import collect
from selfspec.run import entry_point, machine_of, settle_runtime
from selfspec.target.fastest import choices_made


def measure(config: speed.SpeedConfig) -> dict[str, Any]:
    targets, load_s = {}, {}
    for dtype in config.dtypes:
        begin = time.perf_counter()
        targets[dtype] = load_target(config.target, dtype=dtype, device=config.runtime.device)
        load_s[dtype] = time.perf_counter() - begin
    device = next(iter(targets.values())).device
    bandwidth = speed.read_bandwidth(device)
    rates = {dtype: speed.product_rate(device, target.dtype) for dtype, target in targets.items()}
    timed = speed.generation(targets, config)
    seconds = speed.interleaved(timed, config.repeats, device)
    tokens_per_s = {label: config.max_new_tokens / float(np.median(s)) for label, s in seconds.items()}
    fastest = max((label for label in seconds if label.startswith("HF")), key=lambda label: tokens_per_s[label])
    return {
        "generate_tokens_per_s": tokens_per_s,
        "fastest_hf": fastest,
        "speedup_over_fastest_hf": {label: speed.ratio(seconds[fastest], s) for label, s in seconds.items()},
        "verify": {dtype: speed.verify_cost(target, config) for dtype, target in targets.items()},
        "pass_limit_s": {
            dtype: {width: speed.pass_limit(target, width, bandwidth, rates[dtype]) for width in config.widths}
            for dtype, target in targets.items()
        },
        "layouts": speed.layout_costs(config) if device.type == "cpu" else {},
        "round_shares": {dtype: speed.round_shares(target, config) for dtype, target in targets.items()},
        "load_and_pack_s": load_s,
        "weight_bytes": {dtype: target.weight_bytes for dtype, target in targets.items()},
        "bytes_per_step": {dtype: target.step_bytes for dtype, target in targets.items()},
        "read_bandwidth_bytes_per_s": bandwidth,
        "product_operations_per_s": rates,
    }


def markdown(result: dict[str, Any], command: str, machine: dict[str, Any], repeats: int) -> str:
    """The tables, with the command and the machine that made them."""
    lines = [
        f"`{command}`",
        "",
        f"{machine['cpu']}, {machine['num_threads']} threads; GPUs: {machine['gpus'] or 'none'}",
    ]
    lines += ["", f"| generation | tokens/s | × {result['fastest_hf']} |", "|---|---|---|"]
    for label, rate in result["generate_tokens_per_s"].items():
        r = result["speedup_over_fastest_hf"][label]
        lines.append(f"| {label} | {rate:.1f} | {r['ratio']:.2f} [{r['low']:.2f}, {r['high']:.2f}] |")
    dtypes = list(result["verify"])
    heads = " | ".join(f"{d} ms | × one token | limit ms" for d in dtypes)
    lines += ["", f"| verify width | {heads} |", "|---" * (1 + 3 * len(dtypes)) + "|"]
    for width in result["verify"][dtypes[0]]:
        cells = [(result["verify"][dtype][width], result["pass_limit_s"][dtype][width]) for dtype in dtypes]
        texts = [
            f"{c['ms']:.1f} | {c['ratio']:.2f} [{c['low']:.2f}, {c['high']:.2f}] | {1e3 * s:.1f}" for c, s in cells
        ]
        lines.append(f"| {width} | " + " | ".join(texts) + " |")
    bandwidth = result["read_bandwidth_bytes_per_s"]
    rates = ", ".join(f"{rate / 1e9:.0f} GFLOP/s in {d}" for d, rate in result["product_operations_per_s"].items())
    lines += [
        "",
        f"Limit: the larger of bytes over {bandwidth / 1e9:.0f} GB/s and operations over {rates}, both measured.",
    ]
    lines += layouts(result["layouts"])
    lines += ["", "| round | ms | draft | verify | other |", "|---|---|---|---|---|"]
    for dtype in dtypes:
        for label, s in result["round_shares"][dtype].items():
            shares = " | ".join(f"{s[phase]:.1%}" for phase in ("draft", "verify", "other"))
            lines.append(f"| {label}, {dtype} | {s['ms']:.1f} | {shares} |")
    lines += ["", "| dtype | load + pack s | weights MB | read per step MB | one pass GB/s | of read bandwidth |"]
    lines.append("|---|---|---|---|---|---|")
    for dtype in dtypes:
        step = result["bytes_per_step"][dtype]
        rate = step / (result["verify"][dtype][1]["ms"] / 1e3)
        lines.append(
            f"| {dtype} | {result['load_and_pack_s'][dtype]:.1f} | {result['weight_bytes'][dtype] / 1e6:.0f} | "
            f"{step / 1e6:.0f} | {rate / 1e9:.1f} | {rate / bandwidth:.0%} of {bandwidth / 1e9:.0f} GB/s |"
        )
    return "\n".join(lines) + "\n"


def layouts(costs: dict[str, dict[int, dict[str, float]]]) -> list[str]:
    """The same float32 weights in every way of packing them; none for a GPU."""
    if not costs:
        return []
    head, base = " | ".join(f"{layout} ms" for layout in costs), "blocked" if "blocked" in costs else "plain"
    lines = ["", f"| width, weights alone | {head} | half × {base} |", "|---" * (2 + len(costs)) + "|"]
    for width in next(iter(costs.values())):
        r = costs.get("half", {}).get(width)
        against = f"{r['ratio']:.2f} [{r['low']:.2f}, {r['high']:.2f}]" if r else "—"
        cells = " | ".join(f"{costs[layout][width]['ms']:.1f}" for layout in costs)
        lines.append(f"| {width} | {cells} | {against} |")
    return lines


@entry_point("speed")
def main(composed: DictConfig) -> None:
    config = resolve(speed.SpeedConfig, composed)
    settle_runtime(config)
    torch.manual_seed(0)
    result = measure(config)
    provenance = collect(dtype_choices=choices_made())
    command = "python experiments/speed.py " + " ".join(sys.argv[1:])
    text = markdown(result, command, machine_of(provenance), config.repeats)
    Console().print(Markdown(text))
    if config.out:
        folder = Path(config.out)
        folder.mkdir(parents=True, exist_ok=True)
        record = {"command": command, **result, "provenance": provenance}
        (folder / "speed.json").write_text(json.dumps(record, indent=1))
        (folder / "speed.md").write_text(text)


if __name__ == "__main__":
    main()
