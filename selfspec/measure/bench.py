"""Everything one comparison needs, loaded and checked before the first generation that counts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from selfspec.config import CompareConfig, GenerateConfig, conf_dir
from selfspec.decoding.reach import lookahead_for
from selfspec.drafters import Drafter, build_drafter
from selfspec.drafters.base import Limited
from selfspec.lookahead import Lookahead, build_lookahead
from selfspec.measure.divergence import TOLERANCE, Comparison
from selfspec.measure.items import longest_prompt, make_item
from selfspec.measure.memory import growth, in_use
from selfspec.measure.methods import Settings, decode_method, hf_method
from selfspec.measure.protocol import AR, AR_AGAIN, Item, Method
from selfspec.prompts import Prompt, check_apart, prompts_from_config, prompts_hash, take_evenly
from selfspec.provenance import hash_file
from selfspec.records import to_json
from selfspec.sampling import Sampling, build_rule
from selfspec.target import Target, load_target
from selfspec.training.identity import target_identity

PATHS = ("model", "checkpoint", "draft_vocab", "sets")  # options of drafters that name a file or folder
CONTENTS = ("config.json", "layer_skip.json", "*.safetensors")  # what of such a folder makes the draft


@dataclass
class Bench:
    """The target, the methods that are compared on it, and the prompts."""

    target: Target
    methods: list[Method]
    drafters: dict[str, Drafter]  # by label
    prompts: list[Prompt]
    items: list[Item]
    num_turns: int
    comparison: Comparison
    fingerprints: dict[str, str]  # of the weights and the prompts: what a path in the config does not tell


def assemble(config: CompareConfig) -> Bench:
    """Loads and checks everything. Raises UserError for whatever the config alone could not show to be wrong."""
    settings = settings_from(config)
    prompts = prompts_from_config(config.prompts)
    check_apart(prompts, config.tuned_on)
    if config.measure.max_prompts is not None:
        prompts = take_evenly(prompts, config.measure.max_prompts)
    lookaheads = {label: lookahead_of(options, config) for label, options in config.drafters.items()}
    target = load_target(
        config.target, config.runtime.dtype, config.runtime.device, tensor_parallel=config.runtime.tensor_parallel
    )
    longest = longest_prompt(target, prompts, config.max_new_tokens)
    items = [make_item(target, prompt) for prompt in prompts]
    widths = [max(one.max_drafted + 1, getattr(one, "max_width", 0)) for one in lookaheads.values()]  # of a round
    capacity = longest + config.max_new_tokens + max(widths, default=1)

    plain = hf_method(target, settings)
    plain.generate(items[0].token_ids, 2, 0)  # what the first generation of all allocates belongs to no method
    alone = in_use(target.device)
    plain.memory = alone
    methods = [plain, decode_method(AR, target, None, build_lookahead(1), settings, capacity)]
    methods[-1].memory = alone
    fingerprints = {
        "target": target_identity(target)["fingerprint"],
        "prompts": prompts_hash(prompts),
        # changes with the tokenizer and the chat template too
        "prompt_token_ids": hashlib.sha256(to_json([item.token_ids for item in items]).encode()).hexdigest(),
    }
    drafters: dict[str, Drafter] = {}
    for label, options in config.drafters.items():
        with growth(target.device) as grown:
            drafter = drafter_of(options, target)
        if isinstance(drafter, Limited):
            drafter.check_capacity(longest + config.max_new_tokens)  # before a run directory is there
        lookahead_for(target, drafter, lookaheads[label])  # more than it can draft is refused
        method = decode_method(label, target, drafter, lookaheads[label], settings, capacity)
        method.memory = alone + grown
        methods.append(method)
        drafters[label] = drafter
        fingerprints |= draft_fingerprints(label, options, drafter)
    if config.measure.noise_check:
        methods.append(decode_method(AR_AGAIN, target, None, build_lookahead(1), settings, capacity))
        methods[-1].memory, methods[-1].trace = alone, None
    tolerance = config.measure.near_tie_tolerance or TOLERANCE[config.runtime.dtype]
    return Bench(
        target=target,
        methods=methods,
        drafters=drafters,
        prompts=prompts,
        items=items,
        num_turns=sum(len(prompt.turns) for prompt in prompts),
        comparison=Comparison(target, settings.sampling, settings.acceptance, config.seed, tolerance),
        fingerprints=fingerprints,
    )


def settings_from(config: GenerateConfig) -> Settings:
    sampling = Sampling(**asdict(config.sampling))
    build_rule(config.acceptance, sampling)  # an impossible pair is refused before a model is loaded
    return Settings(sampling, config.acceptance, config.ignore_eos, config.runtime.cache)


def lookahead_of(options: Mapping[str, Any], config: GenerateConfig) -> Lookahead:
    """The drafter's own lookahead if it has one, else the comparison's."""
    return build_lookahead(options.get("lookahead") or config.lookahead)


def drafter_of(options: Mapping[str, Any], target: Target) -> Drafter:
    """A drafter from its config. A path that exists only relative to the clone is taken from there."""
    return build_drafter(paths_in_clone(options), target)


def paths_in_clone(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with such paths replaced, also in those of a draft inside a draft (hybrid)."""
    return {
        name: paths_in_clone(value) if isinstance(value, Mapping) else in_clone(value) if name in PATHS else value
        for name, value in options.items()
    }


def in_clone(path: Any) -> Any:
    """The path inside the clone, where it exists only there; anything else as it is."""
    if isinstance(path, str) and not Path(path).exists() and (conf_dir().parent / path).exists():
        return str(conf_dir().parent / path)
    return path


def draft_fingerprints(label: str, options: Mapping[str, Any], drafter: Drafter) -> dict[str, str]:
    """Of the files that make a draft, and of a draft model, which may have come by its name alone."""
    found = {f"draft {label}: {name}": digest for name, digest in hashes_of_contents(options).items()}
    if isinstance(model := getattr(drafter, "model", None), Target):
        found[f"draft {label}"] = model.fingerprint
    return found


def hashes_of_contents(options: Mapping[str, Any]) -> dict[str, str]:
    """sha256 of the files that make this draft (weights, config, skip set), found through its options, by option and
    file; also those of a draft inside a draft (hybrid), as `learned.checkpoint/model.safetensors`.
    """
    found: dict[str, str] = {}
    for option, value in options.items():
        if isinstance(value, Mapping):
            found |= {f"{option}.{name}": digest for name, digest in hashes_of_contents(value).items()}
        elif option in PATHS and isinstance(value, str | Path):
            path = Path(in_clone(str(value))).expanduser()
            files = [path] if path.is_file() else [file for kind in CONTENTS for file in sorted(path.glob(kind))]
            found |= {f"{option}/{file.name}": hash_file(file) for file in files}
    return found
