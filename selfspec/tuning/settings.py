"""What the tuner is asked to do, and what it refuses before anything is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from selfspec.config import CompareConfig, GenerateConfig, MeasureConfig, allowed, at_least, validate
from selfspec.errors import UserError
from selfspec.measure.bench import in_clone
from selfspec.prompts import Prompt, prompts_from_config
from selfspec.run import refuse_side_by_side
from selfspec.tuning.grid import Grid, Variant, variants_of


@dataclass
class TuneConfig(GenerateConfig):
    """conf/tune.yaml."""

    study: str = "tune"
    name: str = "tune"
    out: str = "outputs/tune/tune"
    drafters: list[str] | None = None
    candidates: dict[str, Any] = field(default_factory=dict)
    grid: Grid = field(default_factory=Grid)
    top: int = 8
    num_confirmed: int = 3
    prompts: dict[str, Any] = field(default_factory=dict)
    confirm: dict[str, Any] = field(default_factory=dict)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    tracking: dict[str, Any] = field(default_factory=dict)
    output_dir: str = "outputs"
    force: bool = False


def checked(config: TuneConfig) -> tuple[list[Variant], list[Prompt]]:
    """The drafts to tune over, and the prompts to choose on. Raises UserError: see the messages."""
    at_least("top", config.top, 1)
    at_least("num_confirmed", config.num_confirmed, 1)
    if not config.measure.timed:
        raise UserError(
            "measure.timed=false: the fastest is chosen by its times. Use measure=quick, on a quiet machine."
        )
    labels = list(config.candidates) if config.drafters is None else config.drafters
    if not labels:
        raise UserError(f"there is no drafter to tune. {allowed('', config.candidates)}")
    for label in labels:
        if label not in config.candidates:
            hint = f"To add one: '+candidates.{label}={{kind: ...}}'."
            raise UserError(f"drafters names {label!r}, which is none of `candidates`. "
                            f"{allowed(label, config.candidates)} {hint}")  # fmt: skip
    variants = [
        one for label in dict.fromkeys(labels) for one in variants_of(label, config.candidates[label], config.grid)
    ]
    for variant in variants:
        check_checkpoint(variant.label, variant.options)
    prompts = prompts_to_choose_on(config)
    refuse_side_by_side(comparison(config, "check", {one.label: one.options for one in variants}, config.prompts))
    return variants, prompts


def check_checkpoint(label: str, options: Mapping[str, Any]) -> None:
    """A folder that is missing is found before a model is loaded."""
    for key, value in options.items():
        if isinstance(value, Mapping):
            check_checkpoint(f"{label}.{key}", value)
        elif key == "checkpoint" and not Path(str(in_clone(value))).is_dir():
            raise UserError(
                f"{label}: checkpoint={value} is not there. Train it (experiments/train.py), or leave it out: "
                "drafters=[...] names those to tune over."
            )


def prompts_to_choose_on(config: TuneConfig) -> list[Prompt]:
    """Those of `prompts`. UserError unless they are all for tuning, those of `confirm` all for reports, and apart."""
    choosing, confirming = prompts_from_config(config.prompts), prompts_from_config(config.confirm)
    for key, found, split in (("prompts", choosing, "tune"), ("confirm", confirming, "report")):
        if wrong := [prompt.prompt_id for prompt in found if prompt.split != split]:
            raise UserError(
                f"{key}: {len(wrong)} prompts, for example {wrong[0]!r}, are not of the split {split!r}. Settings are "
                f"chosen on one split and confirmed on the other: set {key}.split={split}, or use another set."
            )
        if len(found) < 2:
            raise UserError(f"{key} has {len(found)} prompt: a speedup needs two or more to have an interval.")
    texts = {prompt.turns[0].strip(): prompt.prompt_id for prompt in confirming}
    both = [prompt.prompt_id for prompt in choosing if prompt.turns[0].strip() in texts]
    both += sorted({prompt.prompt_id for prompt in choosing} & {prompt.prompt_id for prompt in confirming})
    if both:
        raise UserError(f"the prompt {both[0]!r} is in `prompts` and in `confirm`: the winner is confirmed on others.")
    return choosing


def comparison(config: TuneConfig, step: str, drafters: dict[str, Any], prompts: dict[str, Any]) -> CompareConfig:
    """A config of compare.py; `config.yaml` in its run directory repeats it."""
    made = CompareConfig(
        **{key.name: getattr(config, key.name) for key in GenerateConfig.__dataclass_fields__.values()},
        study=config.study,
        name=f"{config.name}-{step}",
        drafters=drafters,
        prompts=prompts,
        measure=replace(config.measure, trace=0, max_prompts=None),
        tracking=config.tracking,
        output_dir=config.output_dir,
        force=config.force,
    )
    validate(made)
    return made
