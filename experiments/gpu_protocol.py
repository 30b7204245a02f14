"""The engine on a GPU, in one command and under eight minutes: correctness, limits, graphs, the cost model, memory.

    python experiments/gpu_protocol.py                              # on a GPU
    python experiments/gpu_protocol.py device=cpu scale=tiny        # the same protocol anywhere, in seconds

It needs torch, transformers and omegaconf, and not Hydra: machines with a GPU are often bare. A section that fails or
takes too long is recorded, and the others run; the exit code says whether anything failed. Results are written after
every section.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from selfspec.config import allowed, conf_dir
from selfspec.errors import UserError
from selfspec.measure.gpu import SCALES, Bench, add_real_model
from selfspec.measure.gpu_sections import ACCEPT_RATES, SECTIONS
from selfspec.measure.sections import OutOfTime, at_most, errors_in, one_line
from selfspec.provenance import collect
from selfspec.target.loading import choose_device

BACKENDS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")


@dataclass
class ProtocolConfig:
    """conf/gpu_protocol.yaml."""

    device: str = "auto"
    scale: str = "full"
    real_model: str | None = None
    seconds: float = 450
    sections: list[str] = field(default_factory=lambda: list(SECTIONS))
    out: str | None = None


def typed(composed: DictConfig) -> ProtocolConfig:
    """UserError for an unknown key, a wrong type, and names that do not exist."""
    plain = {key: value for key, value in composed.items() if key not in ("defaults", "hydra")}
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ProtocolConfig), plain))
    except OmegaConfBaseException as error:
        raise UserError(f"Bad value for {error.full_key}: {str(error.msg or error).splitlines()[0]}.") from error
    assert isinstance(config, ProtocolConfig)
    if config.scale not in SCALES:
        raise UserError(f"scale={config.scale!r} is unknown. {allowed(config.scale, SCALES)}")
    for name in config.sections:
        if name not in SECTIONS:
            raise UserError(f"sections holds {name!r}. {allowed(name, SECTIONS)}")
    return config


def protocol(config: ProtocolConfig) -> dict[str, Any]:
    """Runs the sections, writing what there is after each."""
    device = choose_device(config.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    bench = Bench(device, SCALES[config.scale])
    begin = time.monotonic()
    result: dict[str, Any] = {"device": str(device), "scale": config.scale, "modes": bench.modes, "sections": {}}
    result["notes"] = [add_real_model(bench, config.real_model)]
    if device.type != "cuda":
        result["notes"].append("no CUDA device: rounds run eagerly, split and whole-round graphs are skipped")
    result["provenance"] = collect()
    for name in config.sections:
        measure, most = SECTIONS[name]
        result["sections"][name] = part = dict[str, Any]()
        started = time.monotonic()
        seconds = min(most, config.seconds - (started - begin))
        try:
            if seconds < 1:
                raise OutOfTime(f"nothing is left of {config.seconds:.0f} s")
            with at_most(seconds) as left:
                measure(bench, part, left)
        except (OutOfTime, Exception) as error:  # shown at the end, and in the exit code
            part["error"] = one_line(error)
        part["seconds"] = time.monotonic() - started
        result["seconds"] = time.monotonic() - begin
        result["errors"] = errors_in(result["sections"])
        write(config, result)
        print(f"{name}: {part['seconds']:.1f} s", file=sys.stderr)
    return result


def write(config: ProtocolConfig, result: dict[str, Any]) -> None:
    if config.out:
        folder = Path(config.out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "gpu_protocol.json").write_text(json.dumps(result, indent=1) + "\n")
        (folder / "gpu_protocol.md").write_text(markdown(result))


# ---- the tables


def markdown(result: dict[str, Any]) -> str:
    provenance, sections = result["provenance"], result["sections"]
    versions = ", ".join(f"{name} {provenance['packages'][name]}" for name in ("torch", "transformers"))
    gpus = ", ".join(gpu["name"] for gpu in provenance["gpus"]) or "no GPU"
    lines = [f"`python {' '.join(provenance['argv'])}`", "", f"{gpus}; {provenance['cpu']['model']}; {versions}", ""]
    lines += [f"- {note}" for note in result["notes"]]
    lines += [f"- ERROR {error}" for error in result["errors"]]
    lines += [f"- {result['seconds']:.0f} s: " + ", ".join(f"{n} {p['seconds']:.0f}" for n, p in sections.items())]
    tables = {
        "bandwidth": bandwidth_line,
        "correctness": correctness_table,
        "autoregressive": autoregressive_table,
        "rounds": rounds_table,
        "synthetic": synthetic_table,
        "memory": memory_table,
        "attention": attention_table,
    }
    for name, part in sections.items():
        whole = {key: value for key, value in part.items() if not isinstance(value, dict) or "error" not in value}
        lines += ["", f"## {name}", "", *tables[name](whole)]
    return "\n".join(lines) + "\n"


def parts(section: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(name, part) for name, part in section.items() if isinstance(part, dict)]


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    line = "| " + " | ".join(head) + " |"
    return [line, "|---" * len(head) + "|", *("| " + " | ".join(row) + " |" for row in rows)]


def interval(numbers: dict[str, float], name: str = "median", digits: int = 1) -> str:
    return f"{numbers[name]:.{digits}f} [{numbers['low']:.{digits}f}, {numbers['high']:.{digits}f}]"


def bandwidth_line(section: dict[str, Any]) -> list[str]:
    if "copy_bytes_per_s" not in section:
        return []
    read, copy = section["read_bytes_per_s"] / 1e9, section["copy_bytes_per_s"] / 1e9
    return [f"reading {read:.1f} GB/s, copying {copy:.1f} GB/s; the larger one is the limit below"]


def correctness_table(section: dict[str, Any]) -> list[str]:
    rows = [[name, str(part["compared"]), "; ".join(part["different"]) or "none"] for name, part in parts(section)]
    return table(["model, float32", "outputs compared", "different"], rows)


def autoregressive_table(section: dict[str, Any]) -> list[str]:
    rows = []
    for name, part in parts(section):
        for mode in (key for key, value in part.items() if isinstance(value, dict)):
            one, limit = part[mode], part["limit_tokens_per_s"]
            reached = f"{one['bytes_per_s'] / 1e9:.0f}", f"{one['share_of_bandwidth']:.0%}"
            megabytes = f"{part['bytes_per_step'] / 1e6:.1f}"
            count = str(part["operators_per_step"]) if mode != "generate" else ""
            rows.append([name, mode, interval(one["tokens_per_s"]), f"{limit:.0f}", megabytes, *reached, count])
        rows.append([name, "prompt", f"{part['prompt_tokens_per_s']:.0f}", "", "", "", "", ""])
    head = ["model", "mode", "tokens/s", "limit", "MB per step", "GB/s", "of bandwidth", "operators per step"]
    return table(head, rows)


def rounds_table(section: dict[str, Any]) -> list[str]:
    rows = []
    for name, part in parts(section):
        over = next(value for key, value in part.items() if key.startswith("speedup_of"))
        for mode, rates in part["tokens_per_s"].items():
            gain = interval(over[mode], "ratio", 2) if mode in over else "1"
            rows.append([name, mode, interval(rates), gain, f"{part['tau']:.2f}"])
    return table(["model, drafter", "mode", "tokens/s", "time × the last mode's", "τ"], rows)


def synthetic_table(section: dict[str, Any]) -> list[str]:
    rows = []
    for name, part in parts(section):
        for rate in map(str, ACCEPT_RATES):
            one = part[rate]
            costs = [f"{part['c']:.3f}", f"{part['v']:.3f}"]
            models = [f"{one['model']:.2f}", f"{one['model_at_measured_tau']:.2f}"]
            taus = [f"{one['tau']:.2f}", f"{one['expected_tau']:.2f}"]
            rows.append([name, rate, *costs, *taus, interval(one["speedup"], "ratio", 2), *models])
    head = ["model", "α set", "c", "v", "τ", "τ expected", "S measured", "S model", "S model at measured τ"]
    return table(head, rows)


def memory_table(section: dict[str, Any]) -> list[str]:
    rows = []
    for name, part in parts(section):
        sizes = [f"{part[key] / 1e6:.2f}" for key in ("weight_bytes", "kv_bytes", "estimated_bytes")]
        peak = f"{part['peak_bytes'] / 1e6:.2f}" if "peak_bytes" in part else "not measured"
        share = f"{part['estimate_over_measured']:.3f}" if "peak_bytes" in part else ""
        rows.append([name, *sizes, peak, share])
    head = ["model, drafter", "weights MB", "keys and values MB", "estimated MB", "measured MB", "estimated / measured"]
    return table(head, rows)


def attention_table(section: dict[str, Any]) -> list[str]:
    rows = []
    for name, part in parts(section):
        times = [
            f"{part[one]['us_per_layer']:.1f} ({part[one]['bytes_per_s'] / 1e9:.0f})" if one in part else ""
            for one in BACKENDS
        ]
        off_by = max(part[one]["off_by"] for one in BACKENDS if one in part)
        rows.append([name, part["chosen"], *times, f"{off_by:.1e}"])
    head = ["model, queries over slots", "chosen", *(f"{name} µs (GB/s)" for name in BACKENDS), "off by, at most"]
    return table(head, rows)


# ---- the command line


def run(composed: DictConfig) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        result = protocol(typed(composed))
    print(markdown(result))
    if result["errors"]:
        raise UserError(f"{len(result['errors'])} parts failed; the first: {result['errors'][0]}")


def main() -> None:
    if importlib.util.find_spec("hydra"):
        from selfspec.run import entry_point

        entry_point("gpu_protocol")(run)()
        return
    try:
        given = OmegaConf.from_dotlist(sys.argv[1:])
        run(OmegaConf.merge(OmegaConf.load(conf_dir() / "gpu_protocol.yaml"), given))  # type: ignore[arg-type]
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
