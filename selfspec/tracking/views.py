"""What a mirror shows of a run beyond single numbers: tables, histograms over rounds, one view per method.

Pure functions of a summary (`selfspec.report.statistics.summarise`) and of records; no tracker is imported here, so
that another one can show the same. A comparison of methods wants equal names for equal things: `method_view` gives
every method the same keys and its results the same index, so that charts of several methods lie over each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from selfspec.records import PromptRecord
from selfspec.tracking.base import prompt_metrics

BASELINES = ("ar", "ar_again", "hf_generate")
ROLES = {"independent": "independent_draft", "ngram": "lookup", "synthetic": "scripted"}
ROUND_COUNTS = ("num_drafted", "num_accepted", "num_emitted")
ROUND_TIMES = ("draft_s", "verify_s", "other_s")
TABLE_COLUMNS = (
    "num_prompts", "speedup_paired_geomean", "speedup_paired_geomean_low", "speedup_paired_geomean_high",
    "tokens_per_s", "al_pooled", "al_per_prompt_mean", "alpha", "accepted_per_drafted", "ttft_median_s",
)  # fmt: skip


@dataclass(frozen=True)
class Table:
    """Column names and rows of plain values; None where nothing was measured."""

    columns: list[str]
    rows: list[list[Any]]


@dataclass(frozen=True)
class MethodView:
    """One method under names that every method shares."""

    method: str
    role: str
    results: list[dict[str, Any]]  # `prompt/index`, `prompt/tokens_per_s`, ...: one per result
    histograms: dict[str, tuple[list[float], list[float]]]  # `round/num_accepted` -> (counts, edges)
    summary: dict[str, Any] = field(default_factory=dict)


def role_of(method: str, drafters: Mapping[str, Any]) -> str:
    """What a method is in the comparison: `baseline`, `self_draft`, `independent_draft`, `lookup` or `scripted`."""
    if method in BASELINES:
        return "baseline"
    drafter = drafters.get(method)
    return ROLES.get(str(drafter.get("kind")) if isinstance(drafter, Mapping) else "", "self_draft")


def method_table(summary: Mapping[str, Any]) -> Table:
    """One row per method."""
    return Table(["method", *TABLE_COLUMNS], [[name, *_cells(stats)] for name, stats in _methods(summary).items()])


def category_table(summary: Mapping[str, Any]) -> Table:
    """One row per prompt category and method."""
    rows = [
        [category, name, *_cells(stats)]
        for category, methods in summary.get("categories", {}).items()
        for name, stats in methods.items()
    ]
    return Table(["category", "method", *TABLE_COLUMNS], rows)


def position_table(summary: Mapping[str, Any]) -> Table:
    """Acceptance by position in the draft: joint (this far or further), conditional (given that it came this far)."""
    rows = []
    for name, stats in _methods(summary).items():
        joint, conditional = stats.get("joint_acceptance") or [], stats.get("conditional_acceptance") or []
        for position, together in enumerate(joint):
            rows.append([name, position + 1, together, conditional[position] if position < len(conditional) else None])
    return Table(["method", "position", "joint_acceptance", "conditional_acceptance"], rows)


def round_histograms(records: Sequence[PromptRecord], num_bins: int = 32) -> dict[str, tuple[list[float], list[float]]]:
    """Over all rounds: counts in bins one token wide, times in `num_bins` bins. Empty without rounds."""
    import numpy as np

    rounds = [asdict(one) for record in records for one in record.rounds]
    if not rounds:
        return {}
    histograms = {}
    for name in (*ROUND_COUNTS, *ROUND_TIMES):
        values = np.array([one[name] for one in rounds], dtype=float)
        edges = np.arange(values.max() + 2) - 0.5 if name in ROUND_COUNTS else num_bins
        counts, found_edges = np.histogram(values, bins=edges)
        histograms[name] = (counts.tolist(), found_edges.tolist())
    return histograms


def method_views(
    summary: Mapping[str, Any], records: Sequence[PromptRecord], drafters: Mapping[str, Any]
) -> list[MethodView]:
    """One view per method of the summary, results ordered alike in all of them."""
    turns = {key: index for index, key in enumerate(dict.fromkeys((one.prompt_id, one.repeat) for one in records))}
    views = []
    for name, stats in _methods(summary).items():
        own = sorted((one for one in records if one.method == name), key=lambda one: turns[one.prompt_id, one.repeat])
        results = [
            {
                "prompt/index": turns[one.prompt_id, one.repeat],
                "prompt/prompt_id": one.prompt_id,
                "prompt/category": one.category,
                "prompt/repeat": one.repeat,
                **{f"prompt/{key}": value for key, value in prompt_metrics(one).items()},
            }
            for one in own
        ]
        histograms = {f"round/{key}": value for key, value in round_histograms(own).items()}
        views.append(MethodView(name, role_of(name, drafters), results, histograms, dict(stats)))
    return views


def _methods(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    methods = summary.get("methods")
    return methods if isinstance(methods, Mapping) else {}


def _cells(stats: Mapping[str, Any]) -> list[Any]:
    return [stats.get(name) for name in TABLE_COLUMNS]
