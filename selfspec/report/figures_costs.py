"""Predicted against measured speedup: does the cost model know what a draft is worth?

Measured: decoding, AR's seconds per token over the method's. Predicted: `S model` of the run's summary, which knows the
bytes that are read and the measured τ, and no time (`selfspec.measure.cost_model`). `S simple`, beside it there, is
made from the measured seconds themselves: it would lie on the diagonal whatever the model is worth, and is not drawn.
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

Point = tuple[str, float, float]  # drafter, measured, S model


def has_predictions(runs: Sequence[Measured]) -> bool:
    return bool(predictions(runs))


def predictions(runs: Sequence[Measured]) -> list[Point]:
    """Every method of every run that holds costs, where the model predicts it."""
    points = []
    for item in runs:
        costs = ((item.run.summary or {}).get("costs") or {}).get("methods", {})
        ar_rate = item.summary["methods"][item.summary["baseline"]]["decode_tokens_per_s"]
        drafter_of = {method.label: group.name for group in groups_of(item) for method in group.methods}
        for label, stats in item.summary["methods"].items():
            rate = stats["decode_tokens_per_s"]
            if label == item.summary["baseline"] or label not in costs or not rate or not ar_rate:
                continue
            predicted = costs[label]["speedup_model"]
            if predicted is not None:
                points.append((method_name(drafter_of.get(label, label), stats), rate / ar_rate, predicted))
    return points


def predicted_figure(runs: Sequence[Measured]) -> Figure:
    """A mark per method, one kind of mark per drafter; on the diagonal the prediction is right."""
    points = predictions(runs)
    if not points:
        raise UserError("no run holds costs with a prediction, so there is nothing predicted; leave this figure out.")
    names = list(dict.fromkeys(name for name, *_ in points))
    figure, axes = canvas(height_in=4.0 + 0.16 * (len(names) // 4))
    with style.context(["default", STYLE]):
        values = [value for _, *found in points for value in found]
        low, high = 0.95 * min(values), 1.05 * max(values)
        axes.plot([low, high], [low, high], color="0.4", linewidth=0.8)
        for index, name in enumerate(names):
            measured, predicted = zip(*(found for drafter, *found in points if drafter == name), strict=True)
            marker = MARKERS[index % len(MARKERS)]
            axes.plot(measured, predicted, marker, color="0.25", markersize=5, label=plain(name))
        axes.set(xlim=(low, high), ylim=(low, high), aspect="equal")
        axes.set_xlabel("measured speedup over AR, decoding")
        axes.set_ylabel("predicted from bytes and τ")
        figure.legend(loc="outside lower center", ncols=4)
    return figure
