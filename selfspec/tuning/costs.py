"""What the tuner asks of the target and of each draft before any chain is run: v by width, and accuracies by rank.

Both are measured once and kept as JSON under a hash of what they depend on, the weights of target and drafts included,
so that a tuner that is started again reads them. Building every draft here also means that a missing or foreign one is
refused before anything has been measured. Cost: the target is loaded, if only to know its weights; v takes seconds;
accuracies by rank one plain decoding and one round per token and draft.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from selfspec.config import GenerateConfig
from selfspec.decoding.tree_drafting import GrowsTrees
from selfspec.measure.bench import drafter_of, hashes_of_contents
from selfspec.measure.items import longest_prompt, make_item
from selfspec.measure.rank_accuracy import rank_accuracy
from selfspec.measure.speed import SpeedConfig, verify_cost
from selfspec.prompts import Prompt, prompts_hash
from selfspec.records import to_json, write_atomic
from selfspec.records.schema import parse_object
from selfspec.target import Target, load_target
from selfspec.tuning.grid import Variant

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 33, 48, 64)
VERIFY_REPEATS = 4  # times 5, interleaved by width
NUM_RANKS = 8
Say = Callable[[str], None]


@dataclass(frozen=True)
class Drafts:
    """Of one variant: the longest draft it can make (None: any), its accuracies by rank (None: it grows no trees)."""

    max_drafted: int | None
    accuracies: list[list[float]] | None


@dataclass(frozen=True)
class Costs:
    """verify_ratio: the target's pass over so many positions, over its pass over one. drafts: by variant."""

    verify_ratio: dict[int, float]
    verify_ms: dict[int, float]
    drafts: dict[str, Drafts]


def stored_costs(
    folder: Path,
    config: GenerateConfig,
    variants: Sequence[Variant],
    prompts: Sequence[Prompt],
    say: Say,
    anew: bool = False,
) -> Costs:
    """The costs of exactly this, measured if they are not in `folder`, or `anew`. Raises UserError for a target or a
    draft that cannot be loaded, or does not fit.
    """
    target = load_target(config.target, config.runtime.dtype, config.runtime.device)
    path = costs_file(folder, config, target.fingerprint, variants, prompts)
    say(f"1/4 costs of {len(variants)} drafts, in {path}")
    if anew or not path.exists():
        write_costs(path, measure_costs(target, config, variants, prompts, say))
    return read_costs(path)


def costs_file(
    folder: Path, config: GenerateConfig, fingerprint: str, variants: Sequence[Variant], prompts: Sequence[Prompt]
) -> Path:
    """Where they are kept. fingerprint: the target's; its config may name a folder whose weights were replaced."""
    keys = ("target", "runtime", "max_new_tokens", "ignore_eos")
    parts = {
        "config": {key: value for key, value in asdict(config).items() if key in keys},
        "target": fingerprint,
        "variants": [asdict(variant) for variant in variants],
        "contents": [hashes_of_contents(variant.options) for variant in variants],
        "prompts": prompts_hash(prompts),
    }
    return folder / f"costs-{hashlib.sha256(to_json(parts).encode()).hexdigest()[:8]}.json"


def measure_costs(
    target: Target, config: GenerateConfig, variants: Sequence[Variant], prompts: Sequence[Prompt], say: Say
) -> Costs:
    """Loads every draft once. Raises UserError for one that cannot be loaded or does not fit the target."""
    longest_prompt(target, prompts, config.max_new_tokens)
    drafters = {variant.label: drafter_of(variant.options, target) for variant in variants}
    token_ids = [make_item(target, prompt).token_ids for prompt in prompts]

    most = max(variant.most_verified for variant in variants)
    widths = [width for width in WIDTHS if width < most] + [most]
    say(f"verify cost by width: the target's pass over {', '.join(map(str, widths))} positions")
    context = round(median(len(ids) for ids in token_ids)) + config.max_new_tokens // 2
    timed = verify_cost(target, SpeedConfig(prompt_tokens=context, widths=widths, repeats=VERIFY_REPEATS))

    drafts = {}
    for variant in variants:
        drafter, accuracies = drafters[variant.label], None
        if variant.tree_nodes and isinstance(drafter, GrowsTrees):
            say(f"{variant.label}: accuracies by rank on {len(prompts)} prompts")
            found = rank_accuracy(
                target,
                drafter,
                token_ids,
                max_depth=variant.num_drafted[-1],
                num_ranks=NUM_RANKS,
                max_new_tokens=config.max_new_tokens,
                ignore_eos=config.ignore_eos,
            )
            accuracies = [ranks for ranks, tested in zip(found.accuracies, found.tested, strict=True) if tested]
        drafts[variant.label] = Drafts(drafter.max_drafted, accuracies)
    return Costs(
        {width: cost["ratio"] for width, cost in timed.items()},
        {width: cost["ms"] for width, cost in timed.items()},
        drafts,
    )


def write_costs(path: Path, costs: Costs) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, to_json(asdict(costs), indent=2) + "\n")


def read_costs(path: Path) -> Costs:
    found = parse_object(path.read_bytes(), str(path))
    return Costs(
        {int(width): ratio for width, ratio in found["verify_ratio"].items()},
        {int(width): ms for width, ms in found["verify_ms"].items()},
        {label: Drafts(**one) for label, one in found["drafts"].items()},
    )
