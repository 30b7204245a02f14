"""What a reader needs beside the numbers: hardware, versions, precision, sampling, and which runs they came from.

Taken from each run's provenance and config. What was not recorded is left out rather than guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from selfspec.report.checks import machine
from selfspec.report.runs import Measured

MOST_NAMED = 16  # lookaheads in a caption; more are a grid, and their labels say what they are
FEW_PROMPTS = 12
VERSIONS = ("selfspec", "torch", "transformers", "cuda")


def caption(runs: Sequence[Measured]) -> str:
    """One paragraph; facts that all runs share are said once."""
    apart = differences([item.run.config for item in runs])
    facts = [[fact for fact in [*_facts(item), *own] if fact] for item, own in zip(runs, apart, strict=True)]
    shared = [fact for fact in facts[0] if all(fact in other for other in facts)]
    noisy = [item.name for item in runs if (check := item.summary["noise_check"]) and check["noisy"]]
    sentences = [f"NOISY ({', '.join(noisy)}): AR measured twice differs from itself, see below"] if noisy else []
    sentences += ["; ".join(shared)] if shared else []
    for item, own in zip(runs, facts, strict=True):
        different = [fact for fact in own if fact not in shared]
        if different:
            sentences.append(f"{item.name}: " + "; ".join(different))
    hashes = ", ".join(item.run.config_hash for item in runs)
    sentences.append(f"{'Config' if len(runs) == 1 else 'Configs'} {hashes}")
    return ". ".join(sentences) + "."


def differences(configs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Per run: settings that change what is measured, are not the same in all runs, and that no fact above tells.

    An option of a drafter counts where several runs have the drafter; that only one has it, the rows show.
    """
    settings = [_settings(config) for config in configs]
    differing = []
    for key in dict.fromkeys(key for one in settings for key in one):
        drafter = key[:2] if key[0] == "drafters" else ()
        having = [one for one in settings if not drafter or any(other[:2] == drafter for other in one)]
        if len({repr(one.get(key)) for one in having}) > 1:
            differing.append(key)
    shown = [[f"{'.'.join(key)} {one[key]}" for key in differing if one.get(key) is not None] for one in settings]
    return [
        [*one[:MOST_NAMED], *([f"{len(one) - MOST_NAMED} more that differ, see config.yaml"] * (len(one) > MOST_NAMED))]
        for one in shown
    ]


def _settings(config: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """The resolved config's prompts, seed and options of drafters, by path; a lookahead is told by `_lookahead`."""
    found: dict[tuple[str, ...], Any] = {(name,): config[name] for name in ("seed", "ignore_eos") if name in config}
    prompts, drafters = config.get("prompts"), config.get("drafters")
    if isinstance(prompts, Mapping):
        found |= {("prompts", str(name)): value for name, value in prompts.items()}
    for label, options in drafters.items() if isinstance(drafters, Mapping) else ():
        if isinstance(options, Mapping):
            own = {name: value for name, value in options.items() if name not in ("lookahead", "label")}
            found |= {("drafters", str(label), str(name)): value for name, value in own.items()}
    return found


def estimator_notes(runs: Sequence[Measured]) -> list[str]:
    """How the numbers were computed, and what this set of prompts can and cannot show."""
    interval = runs[0].summary["interval"]
    notes = [
        "Speedup: speedup_paired_geomean (seconds per emitted token over prefill and decode, paired by prompt) with a "
        f"{interval['confidence']:.0%} bootstrap interval over prompts; tokens/s: all tokens over all seconds; "
        "τ: al_pooled; α: mean of Σ min(p, q)."
    ]
    fewest = min((item.summary["num_prompts"] for item in runs if item.timed), default=0)
    if 1 < fewest < FEW_PROMPTS:
        notes.append(
            f"FEW PROMPTS ({fewest}): bootstrap intervals are too narrow for so few (at 6 prompts they hold the truth "
            "86% of the time); go by the test, and measure more."
        )
    detectable = [
        stats["minimum_detectable_speedup"]
        for item in runs
        for name, stats in item.summary["methods"].items()
        if name != item.summary["baseline"] and stats["minimum_detectable_speedup"] is not None
    ]
    if detectable:
        smallest = f"{max(detectable):.3f}" if max(detectable) < 10 else "above 10"
        notes.append(f"Smallest speedup these prompts can show (80% power): {smallest}.")
    for item in runs:
        for name, stats in item.summary["methods"].items():
            if stats["num_prompts"] < item.summary["num_prompts"]:
                done = f"{stats['num_prompts']} of {item.summary['num_prompts']} prompts"
                notes.append(f"INCOMPLETE: {name} decoded {done} of {item.name}.")
    return notes + noise_notes(runs)


def noise_notes(runs: Sequence[Measured]) -> list[str]:
    """AR against itself, run by run: what a caption that says NOISY refers to."""
    notes = []
    for item in runs:
        noise = item.summary["noise_check"]
        if noise:
            ratio, low, high = (noise[f"speedup_paired_geomean{end}"] for end in ("", "_low", "_high"))
            verdict = "; NOISY: the machine was not quiet, measure again" if noise["noisy"] else ""
            run = f" in {item.name}" if len(runs) > 1 else ""
            notes.append(f"AR against AR{run}: {ratio:.3f} [{low:.3f}, {high:.3f}]{verdict}.")
    return notes


def _facts(item: Measured) -> list[str]:
    config, provenance, summary = item.run.config, item.run.provenance, item.summary
    return [
        _target(config.get("target")),
        _dtype(config, provenance),
        _field("{} cache", config, "runtime", "cache").replace("contiguous cache", ""),
        _ranks(config),
        _sampling(config.get("sampling")),
        _field("acceptance {}", config, "acceptance").replace("acceptance auto", ""),
        _lookahead(config),
        _prompts(summary),
        _field("at most {} new tokens", config, "max_new_tokens"),
        _hardware(machine(provenance)),
        _versions(provenance.get("versions")),
    ]


def _target(target: object) -> str:
    if isinstance(target, Mapping):
        return str(target.get("name") or target.get("path") or target.get("kind") or "")
    return str(target or "")


def _dtype(config: Mapping[str, Any], provenance: Mapping[str, Any]) -> str:
    resolved = provenance.get("dtype")
    return str(resolved) if resolved else _field("{}", config, "runtime", "dtype")


def _ranks(config: Mapping[str, Any]) -> str:
    """Said where processes share the target."""
    ranks = _field("{}", config, "runtime", "tensor_parallel")
    return f"{ranks} ranks (tensor parallel)" if ranks not in ("", "1") else ""


def _sampling(sampling: object) -> str:
    """The temperature, and every other transform that is not at its neutral value."""
    if not isinstance(sampling, Mapping) or "temperature" not in sampling:
        return ""
    others = [f"{name} {value}" for name, value in sampling.items() if name != "temperature" and value and value != 1]
    return ", ".join([f"temperature {sampling['temperature']:g}", *others])


def _lookahead(config: Mapping[str, Any]) -> str:
    """K of every drafter; those with a lookahead of their own are named."""
    if not config.get("drafters"):
        return ""
    own = [
        f"{_policy(drafter['lookahead'])} for {label}"
        for label, drafter in config["drafters"].items()
        if isinstance(drafter, Mapping) and drafter.get("lookahead")
    ]
    if len(own) > MOST_NAMED:
        return f"{len(own)} drafters with lookaheads of their own, see config.yaml"
    shared = [_policy(config.get("lookahead"))] if len(own) < len(config["drafters"]) else []
    return ", ".join(part for part in shared + own if part)


def _policy(lookahead: object) -> str:
    """`K = 4`, or the policy's name and settings."""
    if not isinstance(lookahead, Mapping):
        return f"K = {lookahead}" if lookahead else ""
    settings = {name: value for name, value in lookahead.items() if name != "kind" and value is not None}
    if lookahead.get("kind", "fixed") == "fixed":
        return f"K = {settings.get('num_drafted', '?')}"
    return f"{lookahead['kind']} ({', '.join(f'{name} {value}' for name, value in settings.items())})"


def _prompts(summary: Mapping[str, Any]) -> str:
    num_prompts, num_repeats = summary["num_prompts"], summary["num_repeats"]
    repeats = f", {num_repeats} repeats" if num_repeats > 1 else ""
    return f"{num_prompts} prompt{'s' if num_prompts > 1 else ''}{repeats}"


def _field(template: str, tree: Mapping[str, Any], *keys: str) -> str:
    value: Any = tree
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return "" if value is None else template.format(value)


def _hardware(found: Mapping[str, Any]) -> str:
    gpus = found.get("gpus")
    names = [str(gpu.get("name", gpu)) if isinstance(gpu, Mapping) else str(gpu) for gpu in gpus] if gpus else []
    parts = [", ".join(f"{names.count(name)}x {name}" for name in dict.fromkeys(names)), str(found.get("cpu") or "")]
    parts += [
        f"{found[name]} {what}{'s' * (found[name] != 1)}"
        for name, what in (("num_cpus", "CPU"), ("num_threads", "thread"))
        if found.get(name)
    ]
    return ", ".join(part for part in parts if part)


def _versions(versions: object) -> str:
    if not isinstance(versions, Mapping):
        return ""
    return ", ".join(f"{name} {versions[name]}" for name in VERSIONS if versions.get(name))
