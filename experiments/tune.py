"""How far to look, decided by measuring: which drafter, exit layer, K, tree and policy is fastest for a target here.

    python experiments/tune.py
    python experiments/tune.py 'drafters=[eagle3,ngram]' top=4

1 costs: the target's pass by width, and every draft's accuracies by rank. 2 rounds: every draft with its shortest and
longest chain and its largest tree. From these every candidate of the grid is predicted (`selfspec.measure.tuning`).
3 candidates: the promising ones are run. 4 confirm: the fastest ones once more, on prompts that nothing was chosen on.
2 to 4 are comparisons as of compare.py, each in a run directory of its own, in this process; killed at any time, the
same command goes on. `out` gets tune.md, tune.json, and the winner as files that Hydra finds with --config-dir.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from selfspec.config import CompareConfig, GenerateConfig, MeasureConfig, allowed, resolve, validate
from selfspec.errors import UserError
from selfspec.measure.bench import in_clone
from selfspec.measure.protocol import AR
from selfspec.measure.tuning import Curve, Known, Predicted, Reference, RoundCost, acceptance_of, predict, promising
from selfspec.measure.tuning_costs import Costs, costs_file, measure_costs, read_costs, write_costs
from selfspec.measure.tuning_grid import Candidate, Grid, Variant, candidates_of, to_measure, variants_of
from selfspec.prompts import Prompt, prompts_from_config
from selfspec.records import PromptRecord, by_method, read_run, to_json, write_atomic
from selfspec.report.render import print_table, to_markdown
from selfspec.report.runs import Measured, measured
from selfspec.report.tuning import Tuned, ranked, tuned, tuning_table
from selfspec.run import choose_folder, entry_point, measure_into, refuse_mismatch, refuse_side_by_side, settle_runtime


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


@entry_point("tune")
def main(composed: DictConfig) -> None:
    run_tuner(resolve(TuneConfig, composed))


def run_tuner(config: TuneConfig) -> Tuned:
    """All four steps; returns what the table shows. Raises UserError, before anything is measured where that can be."""
    settle_runtime(config)
    variants, prompts = checked(config)
    say = Progress()

    path = costs_file(Path(config.output_dir) / config.study, config, variants, prompts)
    say(f"1/4 costs of {len(variants)} drafts, in {path}")
    if config.force or not path.exists():
        write_costs(path, measure_costs(config, variants, prompts, say))
    costs = read_costs(path)
    grid = {variant.label: candidates_of(variant, *drafts_of(costs, variant)) for variant in variants}

    probes = {label: to_measure(found) for label, found in grid.items()}
    one_each = {one.label: one for found in probes.values() for one in found.values()}
    say(f"2/4 rounds: {len(one_each)} chains and trees on {len(prompts)} prompts")
    rounds = compare(config, "rounds", list(one_each.values()), config.prompts)
    reference, predictions = predict_all(grid, probes, rounds, costs)

    chosen = promising(predictions, config.top)
    say(f"3/4 candidates: the {len(chosen)} most promising of {len(predictions)}, on the same prompts")
    for one in chosen:
        say(f"      {one.candidate.label}: {one.tokens_per_s:.1f} tokens/s predicted, AR {reference.tokens_per_s:.1f}")
    run = compare(config, "candidates", [one.candidate for one in chosen], config.prompts)

    by_label = {one.candidate.label: one for one in chosen}
    best = [by_label[label].candidate for label in ranked(run)[: config.num_confirmed]]
    say(f"4/4 confirm: {', '.join(one.label for one in best)}, on other prompts")
    confirmed = compare(config, "confirm", best, config.confirm)

    expected = {AR: reference.tokens_per_s} | {label: one.tokens_per_s for label, one in by_label.items()}
    result = tuned(expected, run, confirmed, one_each)
    write_products(config, result, by_label, predictions, costs, {"rounds": rounds, "run": run, "confirm": confirmed})
    table = tuning_table(result, run, confirmed, len(predictions))
    write_atomic(Path(config.out) / "tune.md", to_markdown(table))
    print_table(table)
    show_next(config.out)
    return result


class Progress:
    """One line per step, with the time since the start."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"[{time.monotonic() - self._start_s:5.0f} s] {text}", flush=True)


# ---- before anything is measured


def checked(config: TuneConfig) -> tuple[list[Variant], list[Prompt]]:
    """The drafts to tune over, and the prompts to choose on. Raises UserError: see the messages."""
    for key, least in (("top", 1), ("num_confirmed", 1)):
        if getattr(config, key) < least:
            raise UserError(f"{key}={getattr(config, key)} is too small. Allowed: {least} or more.")
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


# ---- the four steps


def drafts_of(costs: Costs, variant: Variant) -> tuple[list[list[float]] | None, int | None]:
    found = costs.drafts[variant.label]
    return found.accuracies, found.max_drafted


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


def compare(config: TuneConfig, step: str, candidates: Sequence[Candidate], prompts: dict[str, Any]) -> Measured:
    """These candidates, AR and plain `generate`, interleaved; read from the run directory if it is measured already."""
    made = comparison(config, step, {one.label: one.run_as() for one in candidates}, prompts)
    folder = choose_folder(made)
    if not (folder / "DONE").exists():
        measure_into(folder, made)
    run = measured(read_run(folder))
    refuse_mismatch(run.summary, folder)
    return run


def predict_all(
    grid: Mapping[str, Sequence[Candidate]],
    probes: Mapping[str, Mapping[str, Candidate]],
    rounds: Measured,
    costs: Costs,
) -> tuple[Reference, list[Predicted]]:
    """AR as it was measured, and every candidate as it should be."""
    groups = by_method(rounds.run.prompts)
    ar = groups[AR]
    reference = Reference(RoundCost.of(ar).total_s, prefill_s(ar), [len(record.token_ids) for record in ar])
    curve = Curve(costs.verify_ratio)
    found = []
    for label, candidates in grid.items():
        records = {role: groups[one.label] for role, one in probes[label].items()}
        shape = probes[label]["tree"].shape if "tree" in records else None
        known = Known(
            acceptance_of(records["longest"]),
            prefill_s(records["longest"]),
            RoundCost.of(records["shortest"]),
            RoundCost.of(records["longest"]),
            (shape, RoundCost.of(records["tree"])) if shape else None,
            costs.drafts[label].accuracies,
        )
        found += [predict(one, known, reference, curve) for one in candidates]
    return reference, found


def prefill_s(records: Sequence[PromptRecord]) -> float:
    return sum(record.prefill_s for record in records) / len(records)


# ---- what is left behind


def write_products(
    config: TuneConfig,
    result: Tuned,
    run: Mapping[str, Predicted],
    predictions: Sequence[Predicted],
    costs: Costs,
    runs: Mapping[str, Measured],
) -> None:
    """tune.json, and the winner as conf files: an experiment for compare.py, a drafter and a lookahead for the rest."""
    winner = run[result.chosen].candidate if result.chosen in run else None
    drafter = winner.variant.options if winner else {"kind": "none"}
    lookahead = winner.lookahead if winner else {"kind": "fixed", "num_drafted": 1}
    label = winner.variant.drafter if winner else None
    found = {
        **result.as_dict(),
        "winner": {"drafter": drafter, "lookahead": lookahead},
        "runs": {name: str(one.run.path) for name, one in runs.items()},
        "verify": {str(width): {"ratio": costs.verify_ratio[width], "ms": ms} for width, ms in costs.verify_ms.items()},
        "predicted": [
            {**{key: value for key, value in vars(one).items() if key != "candidate"}, "label": one.candidate.label}
            for one in sorted(predictions, key=lambda one: -one.tokens_per_s)
        ],
    }
    experiment = {
        "target": asdict(config.target),
        "sampling": asdict(config.sampling),
        "runtime": asdict(config.runtime),
        "acceptance": config.acceptance,
        "tuned_on": tuned_on(config.prompts),
        "study": config.study,
        "name": f"{config.name}-tuned",
        "drafters": {label: {**drafter, "lookahead": lookahead}} if label else {},
    }
    head = f"# {result.chosen}: chosen by experiments/tune.py; tune.md beside this folder says why.\n"
    files = {
        "tune.json": to_json(found, indent=2) + "\n",
        "experiment/tuned.yaml": f"# @package _global_\n{head}{OmegaConf.to_yaml(OmegaConf.create(experiment))}",
        "drafter/tuned.yaml": head + OmegaConf.to_yaml(OmegaConf.create(drafter)),
        "lookahead/tuned.yaml": head + OmegaConf.to_yaml(OmegaConf.create(lookahead)),
    }
    for name, text in files.items():
        path = Path(config.out) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)


def tuned_on(prompts: Mapping[str, Any]) -> list[str]:
    """The set that was chosen on, as later runs name it to refuse its prompts. Sets of the hub have no such name."""
    source = prompts.get("name") or prompts.get("path")
    return [f"{source}#{prompts['split']}" if prompts.get("split") else str(source)] if source else []


def show_next(out: str) -> None:
    print(f"{out}/tune.md, {out}/tune.json. Use it:")
    print(f"  python experiments/compare.py --config-dir {out} experiment=tuned")
    print(f'  python experiments/generate.py --config-dir {out} drafter=tuned lookahead=tuned prompt="..."')


if __name__ == "__main__":
    main()
