"""What the tuner leaves behind: its table and numbers, and the winner as files that Hydra finds with --config-dir."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from selfspec.records import to_json, write_atomic
from selfspec.report.runs import Measured
from selfspec.report.tuning import Tuned
from selfspec.tuning.costs import Costs
from selfspec.tuning.prediction import Predicted
from selfspec.tuning.settings import TuneConfig


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
