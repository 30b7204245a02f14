"""Predicted against measured speedup: does the cost model know what a draft is worth?

Measured: decoding, AR's seconds per token over the method's. `S model` knows the bytes that are read and the measured τ
(`selfspec.measure.cost_model`), `S simple` the measured draft, verify and other seconds; both are in the run's summary.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib import style
from matplotlib.figure import Figure

from selfspec.errors import UserError
from selfspec.report.figure_style import MARKERS, STYLE, canvas, plain
from selfspec.report.lookaheads import groups_of
from selfspec.report.runs import Measured
from selfspec.report.tables import method_name

Point = tuple[str, float, float | None, float]  # drafter, measured, S model, S simple


def has_predictions(runs: Sequence[Measured]) -> bool:
    return bool(predictions(runs))


def predictions(runs: Sequence[Measured]) -> list[Point]:
    """Every method with a drafter of every run that holds costs."""
    points = []
    for item in runs:
        costs = ((item.run.summary or {}).get("costs") or {}).get("methods", {})
        ar_rate = item.summary["methods"][item.summary["baseline"]]["decode_tokens_per_s"]
        drafter_of = {method.label: group.name for group in groups_of(item) for method in group.methods}
        for label, stats in item.summary["methods"].items():
            rate = stats["decode_tokens_per_s"]
            if label == item.summary["baseline"] or label not in costs or not rate or not ar_rate:
                continue
            own = costs[label]
            name = method_name(drafter_of.get(label, label), stats)
            points.append((name, rate / ar_rate, own["speedup_model"], own["speedup_simple"]))
    return points


def predicted_figure(runs: Sequence[Measured]) -> Figure:
    """A mark per method, one kind of mark per drafter; filled: by bytes, hollow: by the times of the phases."""
    points = predictions(runs)
    if not points:
        raise UserError("no run holds costs, so there is nothing predicted; leave this figure out.")
    names = list(dict.fromkeys(name for name, *_ in points))
    figure, axes = canvas(height_in=4.0 + 0.16 * (len(names) // 4))
    with style.context(["default", STYLE]):
        values = [value for _, *found in points for value in found if value is not None]
        low, high = 0.95 * min(values), 1.05 * max(values)
        axes.plot([low, high], [low, high], color="0.4", linewidth=0.8)
        for index, name in enumerate(names):
            marker, label = MARKERS[index % len(MARKERS)], plain(name)
            for drafter, measured, model, simple in points:
                if drafter != name:
                    continue
                axes.plot(measured, simple, marker, color="black", markerfacecolor="white", markersize=5)
                if model is not None:
                    axes.plot(measured, model, marker, color="0.25", markersize=5)
            axes.plot([], [], marker, color="0.25", label=label)
        axes.set(xlim=(low, high), ylim=(low, high), aspect="equal")
        axes.set_xlabel("measured speedup over AR, decoding")
        axes.set_ylabel("predicted: filled by bytes and τ,\nhollow by the times of the phases")
        figure.legend(loc="outside lower center", ncols=4)
    return figure
