"""Which draft, exit layer and K would pay on machines that are not at hand. Predicted: nothing here was measured.

    python experiments/plan.py target=hf target.path=<folder with config.json> hardware=h200 devices=[1,4] rows=[1,16]

`selfspec.measure.roofline` and `selfspec.measure.plan` say what is modelled, and what is left out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig

from selfspec.config import TargetConfig, typed
from selfspec.errors import UserError
from selfspec.measure.plan import DraftPlan, Prediction, fits, predict
from selfspec.measure.roofline import Hardware, Machine, pass_s
from selfspec.records import to_json, writable, write_atomic
from selfspec.report.render import print_table, to_markdown
from selfspec.report.tables import DASH, Block, Table
from selfspec.run import entry_point
from selfspec.target.shape import ModelShape, shape_of

HEADER = ["draft", "E", "K", "α assumed", "τ", "c", "v", "speedup", "tokens/s", "break-even α"]


@dataclass
class PlanConfig:
    """conf/plan.yaml."""

    target: TargetConfig = field(default_factory=TargetConfig)
    hardware: Hardware = MISSING
    devices: list[int] = field(default_factory=lambda: [1])
    rows: list[int] = field(default_factory=lambda: [1])
    context: int = 2048
    dtype: str = "bfloat16"
    bandwidth_share: float = 0.8
    compute_share: float = 0.6
    most_drafted: int = 10
    out: str | None = None
    drafts: dict[str, DraftPlan] = field(default_factory=dict)


@entry_point("plan")
def main(composed: DictConfig) -> None:
    show_plan(typed(PlanConfig, composed))


def show_plan(config: PlanConfig) -> None:
    """Print the predictions, and write them where `out` says."""
    for name, numbers in (("devices", config.devices), ("rows", config.rows)):
        if not numbers or min(numbers) < 1:
            raise UserError(f"{name}={numbers}: give whole numbers of 1 or more.")
    if config.context < 0 or config.most_drafted < 1 or not config.drafts:
        raise UserError("context must be 0 or more, most_drafted 1 or more, and there must be drafts to compare.")
    model = shape_of(config.target)
    blocks, found = [], []
    for num_devices in config.devices:
        machine = machine_of(config, num_devices)
        for rows in config.rows:
            predictions = sorted(
                (predict(label, draft, model, machine, rows, config.context, config.most_drafted)
                 for label, draft in config.drafts.items()),
                key=lambda one: -one.speedup,
            )  # fmt: skip
            blocks.append(block(model, machine, rows, config.context, predictions))
            found.append({"devices": num_devices, "rows": rows, "predicted": [asdict(one) for one in predictions]})
    table = Table("plan", HEADER, blocks, caption(config, model), NOTES)
    print_table(table)
    if config.out:
        folder = Path(config.out)
        with writable(folder, "out"):
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / "plan.md", to_markdown(table))
            write_atomic(folder / "plan.json", to_json({"model": asdict(model), "plans": found}, indent=2) + "\n")
        print(folder / "plan.md")


def machine_of(config: PlanConfig, num_devices: int) -> Machine:
    return Machine(config.hardware, num_devices, config.dtype, config.bandwidth_share, config.compute_share)


def block(model: ModelShape, machine: Machine, rows: int, context: int, predictions: list[Prediction]) -> Block:
    step = pass_s(model, machine, rows, context)
    room = "" if fits(model, machine, rows, context) else "; DOES NOT FIT into the memory"
    label = (
        f"predicted: {machine.num_devices} x {machine.hardware.name}, {rows} row{'s' * (rows != 1)}, {context} tokens "
        f"of context; AR step {1000 * step:.2f} ms, {rows / step:.0f} tokens/s{room}"
    )
    return Block(label, [row(one) for one in predictions])


def row(one: Prediction) -> list[str]:
    pays = one.speedup > 1
    return [
        one.label + ("" if pays else " (does not pay)"),
        DASH if one.exit_layer is None else str(one.exit_layer),
        str(one.num_drafted),
        f"{one.alpha:.2f}",
        f"{one.tau:.2f}",
        f"{one.c:.2f}",
        f"{one.v:.2f}",
        f"{one.speedup:.2f}",
        f"{one.tokens_per_s:.0f}",
        DASH if one.break_even is None else f"{one.break_even:.2f}",
    ]


NOTES = [
    "PREDICTED from shapes and data sheets; nothing was measured. α is an assumption; E and K: the best tried.",
    "c, v: a draft step and a verify pass, in AR steps. Break-even α: below it, E and K cost more than they bring.",
    "Left out: kernel launches, sampling, scheduling, imperfect overlap, and that α falls with the drafted position.",
]


def caption(config: PlanConfig, model: ModelShape) -> str:
    target: Any = config.target
    billions = (
        model.num_layers * (model.layer_params + model.expert_params) + model.head_params * (1 if model.tied else 2)
    ) / 1e9
    return (
        f"Predicted for {target.name or target.path or target.kind} ({billions:.2f} B parameters, {model.num_layers} "
        f"layers) in {config.dtype}; reached: {config.bandwidth_share:.0%} of the bandwidth, "
        f"{config.compute_share:.0%} of the arithmetic."
    )


if __name__ == "__main__":
    main()
