"""Throughput and latency against the number of rows, from cells alone: summary, two tables, one figure.

Speculation spends arithmetic to save passes over the weights. With more rows in a pass the arithmetic stops being free,
so every method's speedup over AR falls with the number of rows, and somewhere crosses 1: `break_even`.

Speedup: tokens/s (over the makespan) of the method over AR's, on the same number of rows and the same load. It is the
product of two ratios: tokens per second that a request holds a row, and rows that hold one. The interval resamples
requests, each paired with itself, in the first and keeps the second as it was; so it holds the choice of requests, and
not what slows a whole cell, which the order of cells and the repeats are there for. A load with few requests per row
is mostly the filling and emptying of the rows: see `busy_rows`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from selfspec.errors import UserError
from selfspec.records.serving import Cell
from selfspec.report import latency
from selfspec.report.figure_style import LINES, STYLE, WIDTH_IN
from selfspec.report.intervals import CONFIDENCE, percentile_interval, resample_counts
from selfspec.report.speedup import speedup_total_time
from selfspec.report.tables import DASH, Block, Table

BASELINE = "ar"


def summarise_cells(cells: Sequence[Cell]) -> dict[str, Any]:
    """One point per (method, rows) that was measured, and each method's break-even. Raises UserError without AR."""
    by_point: dict[tuple[str, int], dict[int, Cell]] = {}
    for cell in cells:
        by_point.setdefault((cell.method, cell.num_rows), {})[cell.repeat] = cell
    methods = list(dict.fromkeys(sorted((method for method, _ in by_point), key=lambda name: name != BASELINE)))
    if BASELINE not in methods:
        raise UserError("no cell of AR was measured, so there is nothing to compare with; measure again.")
    rows = sorted({num_rows for _, num_rows in by_point})
    reference = by_point.get((BASELINE, rows[0]), {})
    points = [
        _point(by_point[method, num_rows], by_point.get((BASELINE, num_rows), {}), reference)
        for method in methods
        for num_rows in rows
        if (method, num_rows) in by_point
    ]
    curves = {method: [point for point in points if point["method"] == method] for method in methods[1:]}
    return {
        "baseline": BASELINE,
        "methods": methods,
        "rows": rows,
        "num_repeats": len({cell.repeat for cell in cells}),
        "num_requests": max(len(cell.requests) for cell in cells),
        "open_loop": cells[0].open_loop,
        "points": points,
        "break_even": {method: break_even(curve) for method, curve in curves.items()},
    }


def _point(cells: Mapping[int, Cell], baseline: Mapping[int, Cell], reference: Mapping[int, Cell]) -> dict[str, Any]:
    every = list(cells.values())
    first = every[0]
    pairs = [
        (mine.tokens_sha, theirs.tokens_sha)
        for repeat in cells
        if repeat in reference
        for mine, theirs in zip(cells[repeat].requests, reference[repeat].requests, strict=True)
    ]
    return {
        "method": first.method,
        "num_rows": first.num_rows,
        "lossy": first.lossy,
        "synthetic": first.synthetic,
        "num_repeats": len(every),
        "tokens_per_s": _tokens_per_s(every),
        "tokens_per_s_by_repeat": [_tokens_per_s([cell]) for cell in every],
        "busy_rows": float(np.mean([latency.busy_rows(cell) for cell in every])),
        "al_pooled": latency.al_pooled(every),
        "speedup": None if first.method == BASELINE else speedup(cells, baseline),
        "num_equal": sum(mine == theirs for mine, theirs in pairs),
        "num_compared": len(pairs),
        "latency_ms": latency.latencies_ms(every),
    }


def speedup(cells: Mapping[int, Cell], baseline: Mapping[int, Cell]) -> dict[str, float | None] | None:
    """Tokens/s over the baseline's in the repeats that both have, with a bootstrap interval; None if there is none."""
    shared = sorted(set(cells) & set(baseline))
    if not shared:
        return None
    ours, theirs = ([side[repeat] for repeat in shared] for side in (cells, baseline))
    ratio = _tokens_per_s(ours) / _tokens_per_s(theirs)
    times_P4 = np.array(
        [
            (sum(mine.num_emitted), latency.row_s(mine), sum(other.num_emitted), latency.row_s(other))
            for one, another in zip(ours, theirs, strict=True)
            for mine, other in zip(one.requests, another.requests, strict=True)
        ],
        dtype=np.float64,
    )
    result: dict[str, float | None] = {"ratio": ratio, "low": None, "high": None}
    if len(times_P4) > 1:
        sums_R4 = resample_counts(len(times_P4), seed=0) @ times_P4
        logs_R = np.log(sums_R4[:, 3] / sums_R4[:, 2]) - np.log(sums_R4[:, 1] / sums_R4[:, 0])
        busy_rows_ratio = ratio / speedup_total_time(times_P4)
        result["low"], result["high"] = percentile_interval(logs_R + math.log(busy_rows_ratio))
    return result


def _tokens_per_s(cells: Sequence[Cell]) -> float:
    return sum(map(latency.num_tokens, cells)) / sum(map(latency.makespan_s, cells))


def break_even(curve: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Up to how many rows a method pays: the last measured number before its speedup first falls below 1.

    `rows` interpolates the crossing, log speedup against log rows. `clear`: the intervals on both sides leave out 1.
    """
    measured = [(point["num_rows"], point["speedup"]) for point in curve if point["speedup"] is not None]
    below = next((place for place, (_, found) in enumerate(measured) if found["ratio"] < 1), None)
    pays, stops = measured, None
    if below is not None:
        pays, stops = measured[:below], measured[below]
    result: dict[str, Any] = {
        "pays_up_to": pays[-1][0] if pays else None,
        "not_at": stops[0] if stops else None,
        "rows": None,
        "clear": all(_side(found) for _, found in [*pays[-1:], *([stops] if stops else [])]) if measured else False,
    }
    if pays and stops:
        (left, above), (right, under) = pays[-1], stops
        share = math.log(above["ratio"]) / (math.log(above["ratio"]) - math.log(under["ratio"]))
        result["rows"] = left * (right / left) ** share
    return result


def _side(found: Mapping[str, float | None]) -> bool:
    """Whether the whole interval lies on one side of 1."""
    low, high = found["low"], found["high"]
    return low is not None and high is not None and (low > 1 or high < 1)


def break_even_text(method: str, found: Mapping[str, Any]) -> str:
    doubt = "" if found["clear"] else " (an interval next to it includes 1, or there is none)"
    if found["pays_up_to"] is None:
        return f"{method} does not pay at {found['not_at']} row{'s' * (found['not_at'] != 1)} already{doubt}."
    if found["not_at"] is None:
        return f"{method} pays at all measured numbers of rows, up to {found['pays_up_to']}{doubt}."
    return (
        f"{method} stops paying between {found['pays_up_to']} and {found['not_at']} rows, at about "
        f"{found['rows']:.1f}{doubt}."
    )


def concurrency_tables(summary: Mapping[str, Any], caption: str) -> tuple[Table, Table]:
    """Throughput, with the break-even points as notes, and latency."""
    points = sorted(summary["points"], key=lambda point: point["num_rows"])  # methods keep their order
    names = {point["method"]: f"{point['method']}{_mark(point)}" for point in points}
    fewest = f"{summary['rows'][0]} row{'s' * (summary['rows'][0] != 1)}"
    rate_notes = [break_even_text(names[method], found) for method, found in summary["break_even"].items()]
    rate_notes.append(
        f"Speedup: tokens/s (over the makespan) over AR's, same rows and load, with a {CONFIDENCE:.0%} bootstrap "
        "interval over requests (it does not hold what slows a whole cell); τ: al_pooled; busy rows: rows that hold a "
        f"request, over the makespan; equal: requests with the tokens of AR on {fewest}."
    )
    if any(map(_mark, points)):
        rate_notes.append("† lossy: the rule does not keep the target's distribution. ‡ synthetic acceptance.")
    sent = "its arrival" if summary["open_loop"] else "its admission to a row (closed loop)"
    delay_notes = [
        f"TTFT: first tokens after the request was sent, here {sent}. TPOT: (last − first commit) / tokens after the "
        "first commit, per request. ITL: gap between two commits of a request; a round's tokens arrive together. "
        "Percentiles (p50/p95/p99) over the requests (ITL: over the gaps) of all repeats."
    ]
    rate_header = ["rows", "method", "tokens/s", "speedup vs AR", "τ", "busy rows", "equal to AR"]
    delay_header = ["rows", "method", "queue s", "TTFT ms", "TPOT ms", "ITL ms"]
    rates = [[str(point["num_rows"]), names[point["method"]], *_rate_cells(point)] for point in points]
    delays = [[str(point["num_rows"]), names[point["method"]], *_delay_cells(point)] for point in points]
    return (
        Table("concurrency", rate_header, [Block("Throughput", rates)], caption, rate_notes),
        Table("concurrency_latency", delay_header, [Block("Latency", delays)], caption, delay_notes),
    )


def _rate_cells(point: Mapping[str, Any]) -> list[str]:
    return [
        f"{point['tokens_per_s']:.1f}",
        "1.00" if point["method"] == BASELINE else _interval(point["speedup"]),
        f"{point['al_pooled']:.2f}",
        f"{point['busy_rows']:.1f}",
        f"{point['num_equal']}/{point['num_compared']}",
    ]


def _delay_cells(point: Mapping[str, Any]) -> list[str]:
    found = point["latency_ms"]
    return [_three(found["queue"], 1e-3, 1), *(_three(found[name], 1, 0) for name in ("ttft", "tpot", "itl"))]


def _three(found: Mapping[str, float] | None, scale: float, digits: int) -> str:
    return DASH if found is None else " / ".join(f"{value * scale:.{digits}f}" for value in found.values())


def _mark(point: Mapping[str, Any]) -> str:
    return ("†" if point["lossy"] else "") + ("‡" if point["synthetic"] else "")


def _interval(found: Mapping[str, float | None] | None) -> str:
    if found is None:
        return DASH
    return f"{found['ratio']:.2f}" + (f" [{found['low']:.2f}, {found['high']:.2f}]" if found["low"] is not None else "")


def concurrency_figure(summary: Mapping[str, Any]) -> Figure:
    """Left: tokens/s against rows. Right: speedup over AR with its interval; a cross where it falls below 1."""
    with style.context(["default", STYLE]):
        figure = Figure(figsize=(WIDTH_IN, 2.7), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        right.axhline(1.0, color="0.4", linewidth=0.8)
        for index, method in enumerate(summary["methods"]):
            curve = [point for point in summary["points"] if point["method"] == method]
            look = _look(index, len(summary["methods"]), hollow=bool(_mark(curve[0])))
            label = f"{method}{_mark(curve[0])}".replace("$", r"\$")
            left.plot([p["num_rows"] for p in curve], [p["tokens_per_s"] for p in curve], label=label, **look)
            if method != summary["baseline"]:
                aside = 1.03 ** (index - len(summary["methods"]) / 2)  # so that intervals do not cover each other
                _draw_speedup(right, curve, summary["break_even"][method], look, aside)
        left.set(ylabel="tokens/s", title="throughput", ylim=(0, None))
        right.set(ylabel="speedup over AR, same rows", title="× : break-even")
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_xticks(summary["rows"], [str(num_rows) for num_rows in summary["rows"]])
            axes.set_xlabel("rows decoded together")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=min(5, index + 1))
    return figure


def _draw_speedup(
    axes: Axes, curve: Sequence[Mapping[str, Any]], crossing: Mapping[str, Any], look: dict[str, Any], aside: float
) -> None:
    shown = [(point["num_rows"], point["speedup"]) for point in curve if point["speedup"] is not None]
    if not shown:
        return
    rows, ratios = [num_rows * aside for num_rows, _ in shown], [found["ratio"] for _, found in shown]
    if any(found["low"] is None for _, found in shown):
        axes.plot(rows, ratios, **look)
    else:
        below = [found["ratio"] - found["low"] for _, found in shown]
        above = [found["high"] - found["ratio"] for _, found in shown]
        axes.errorbar(rows, ratios, yerr=[below, above], capsize=2, elinewidth=0.8, **look)
    if crossing["rows"] is not None:
        axes.plot(crossing["rows"], 1.0, "x", color="black", markersize=7, markeredgewidth=1.5)


def _look(index: int, count: int, hollow: bool) -> dict[str, Any]:
    marker, dashes = LINES[index % len(LINES)]
    grey = str(round(0.6 * (index / max(1, count - 1)), 2))
    face = "white" if hollow else grey
    return {"marker": marker, "linestyle": dashes, "color": grey, "markersize": 4, "markerfacecolor": face}
