"""How far to look, decided by measuring: which drafter, exit layer, K, tree and policy is fastest for a target here.

1 costs: the target's pass by width, and every draft's accuracies by rank. 2 rounds: every draft with its shortest and
longest chain and its largest tree. From these every candidate of the grid is predicted (`selfspec.tuning.prediction`).
3 candidates: the promising ones are run. 4 confirm: the fastest ones once more, on prompts that nothing was chosen on.
2 to 4 are comparisons as of compare.py, each in a run directory of its own, in this process; killed at any time, the
same command goes on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from selfspec.measure.protocol import AR
from selfspec.records import PromptRecord, by_method, read_run, write_atomic
from selfspec.report.render import print_table, to_markdown
from selfspec.report.runs import Measured, measured
from selfspec.report.tuning import Tuned, ranked, tuned, tuning_table
from selfspec.run import choose_folder, measure_into, refuse_mismatch, settle_runtime
from selfspec.tuning.costs import Costs, stored_costs
from selfspec.tuning.grid import Candidate, Variant, candidates_of, to_measure
from selfspec.tuning.prediction import (
    Curve,
    Known,
    Predicted,
    Reference,
    RoundCost,
    acceptance_of,
    predict,
    promising,
)
from selfspec.tuning.products import show_next, write_products
from selfspec.tuning.settings import TuneConfig, checked, comparison


def run_tuner(config: TuneConfig) -> Tuned:
    """All four steps; returns what the table shows. Raises UserError, before anything is measured where that can be."""
    settle_runtime(config)
    variants, prompts = checked(config)
    say = Progress()

    costs = stored_costs(Path(config.output_dir) / config.study, config, variants, prompts, say, config.force)
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


def drafts_of(costs: Costs, variant: Variant) -> tuple[list[list[float]] | None, int | None]:
    found = costs.drafts[variant.label]
    return found.accuracies, found.max_drafted


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
