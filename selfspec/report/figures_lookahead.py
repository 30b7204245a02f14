"""How far to look, drawn: speedup against K for every drafter, and by exit layer and K for drafts that exit early."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from selfspec.errors import UserError
from selfspec.report.figure_style import STYLE, WIDTH_IN, panels, plain
from selfspec.report.lookaheads import Group, Looked, groups_of
from selfspec.report.policies import oracle_of
from selfspec.report.runs import Measured, told_apart
from selfspec.report.tables import method_name

Cells = dict[tuple[int, int], float]  # (exit layer, K) -> speedup


# ---- speedup against K


def lookahead_groups(runs: Sequence[Measured]) -> list[Group]:
    """Drafters with several fixed K, of runs whose times count."""
    return [group for item in runs if item.timed for group in groups_of(item) if len(group.by_k) > 1]


def lookahead_figure(runs: Sequence[Measured]) -> Figure:
    """Speedup of total time, so that the oracle's is one of the same kind. Other policies stand at their mean draft."""
    groups = lookahead_groups(runs)
    if not groups:
        raise UserError("no drafter was measured with several K, so there is no curve; leave this figure out.")
    with style.context(["default", STYLE]):
        figure, found = panels(len(groups), height_in=1.6, extra_in=0.6)
        for axes, group in zip(found, groups, strict=True):
            _draw(axes, group)
            run = told_apart(group.run, runs).replace(" (", "\n(")
            axes.set_title(plain(group.name + group.marks + run), fontsize=7)
        figure.supxlabel("K, drafted tokens per round", fontsize=8)
        figure.supylabel("speedup over AR", fontsize=8)
        figure.legend(*found[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def _draw(axes: Axes, group: Group) -> None:
    ks = list(group.by_k)
    stats = [group.by_k[k].stats for k in ks]
    axes.axhline(1.0, color="0.4", linewidth=0.8)
    axes.plot(
        [0, *ks], [1.0, *(one["speedup_total_time"] for one in stats)], "o-", color="black", ms=4, label="fixed K"
    )
    for k, one in zip(ks, stats, strict=True):
        if one["speedup_total_time_low"] is not None:
            ends = [one["speedup_total_time_low"], one["speedup_total_time_high"]]
            axes.plot([k, k], ends, color="black", linewidth=1.0)
    others = [method for method in group.methods if method.fixed is None and not method.is_tree]
    axes.plot(
        [mean_drafted(method) for method in others],
        [method.stats["speedup_total_time"] for method in others],
        "D",
        color="black",
        markerfacecolor="white",
        markersize=4,
        label="policies",
    )
    axes.axhline(oracle_speedup(group), color="black", linestyle=(0, (4, 2)), linewidth=1.0, label="oracle")
    axes.set_xticks(range(0, max(ks) + 1))
    axes.set_xlim(-0.3, max(ks) + 0.3)


def mean_drafted(method: Looked) -> float:
    return fmean(entry.num_drafted for record in method.records for entry in record.rounds)


def oracle_speedup(group: Group) -> float:
    """Of total time: AR's seconds per token over the drafter's prefill and the oracle's decoding."""
    bound = oracle_of(group)
    assert bound is not None, "a group with fixed lookaheads has an oracle"
    ar = group.run.summary["methods"][group.run.summary["baseline"]]
    prefill_s = group.by_k[max(group.by_k)].stats["prefill_s_per_token"]
    return float((1 / ar["tokens_per_s"]) / (prefill_s + 1 / bound))


# ---- exit layer by K


def exit_cells(runs: Sequence[Measured]) -> dict[str, Cells]:
    """Per kind of draft with an `exit_layer` option: (exit layer, K) -> speedup; kinds with one cell are left out."""
    found: dict[str, dict[tuple[int, int], list[float]]] = {}
    for item in runs:
        for group in groups_of(item):
            exit_layer = group.options.get("exit_layer")
            if exit_layer is None:
                continue
            for k, method in group.by_k.items():
                speedup = method.stats["speedup_paired_geomean"]
                if speedup is not None:
                    kind = method_name(str(group.options["kind"]), method.stats)  # a lossy one has its own
                    found.setdefault(kind, {}).setdefault((int(exit_layer), k), []).append(math.log(speedup))
    cells = {kind: {at: math.exp(fmean(logs)) for at, logs in kinds.items()} for kind, kinds in found.items()}
    return {kind: at for kind, at in cells.items() if len(at) > 1}


def exit_layer_figure(runs: Sequence[Measured]) -> Figure:
    """A map per kind of draft: the darker, the faster; bold: faster than AR. What was measured twice is averaged."""
    kinds = exit_cells(runs)
    if not kinds:
        raise UserError("no two exit layers or K were measured, so there is no map; leave this figure out.")
    heights = [0.7 + 0.24 * len({exit_layer for exit_layer, _ in cells}) for cells in kinds.values()]
    with style.context(["default", STYLE]):
        figure = Figure(figsize=(WIDTH_IN, sum(heights)), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(kinds), 1, squeeze=False, height_ratios=heights)
        for (axes,), (kind, cells) in zip(grid, kinds.items(), strict=True):
            _draw_map(axes, cells)
            axes.set_title(plain(f"{kind}: speedup over AR"))
    return figure


def _draw_map(axes: Axes, cells: Cells) -> None:
    layers, ks = (sorted({at[i] for at in cells}) for i in (0, 1))
    values_EK = np.array([[cells.get((layer, k), np.nan) for k in ks] for layer in layers])
    low, high = float(np.nanmin(values_EK)), float(np.nanmax(values_EK))
    axes.imshow(values_EK, cmap="Greys", vmin=low - 0.3 * (high - low + 1e-9), vmax=high, aspect="auto")
    for row, layer in enumerate(layers):
        for column, k in enumerate(ks):
            value = cells.get((layer, k))
            dark = value is not None and value > low + 0.45 * (high - low)
            axes.text(
                column,
                row,
                "—" if value is None else f"{value:.2f}",
                ha="center",
                va="center",
                color="white" if dark else "black",
                fontweight="bold" if value is not None and value > 1 else "normal",
            )
    axes.set_xticks(range(len(ks)), [str(k) for k in ks])
    axes.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    axes.set(xlabel="K, drafted tokens per round", ylabel="exit layer")
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
