"""The figures of run directories, readable in greyscale (`figure_style`); those that a run cannot fill are left out.

speedup      paired speedup over AR with its interval, per method
acceptance   how often each drafted position is accepted: conditional (what the draft can do) and joint
time         where the time of one emitted token goes
lookahead    speedup against K, per drafter, with the other policies and the oracle (figures_lookahead)
exit_layers  speedup by exit layer and K, from the runs of a sweep (figures_lookahead)
predicted    speedup as the cost model has it against speedup as measured (figures_costs)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from selfspec.errors import UserError
from selfspec.report.figure_style import STYLE, canvas, name_rows, panels, plain, to_bytes
from selfspec.report.figures_costs import has_predictions, predicted_figure
from selfspec.report.figures_lookahead import exit_cells, exit_layer_figure, lookahead_figure, lookahead_groups
from selfspec.report.lookaheads import groups_of
from selfspec.report.runs import Measured, told_apart
from selfspec.report.tables import method_name

__all__ = ["acceptance_figure", "all_figures", "speedup_figure", "time_figure", "to_bytes"]

PHASES = [  # statistic, legend, grey, hatch
    ("prefill_s_per_token", "prefill", "1.0", ""),
    ("draft_s_per_token", "draft", "0.75", "////"),
    ("verify_s_per_token", "verify", "0.35", ""),
    ("other_s_per_token", "other", "0.9", "...."),
    ("decode_s_per_token", "decode, not split", "0.6", "xxxx"),
]
Methods = list[tuple[str, dict[str, Any]]]
Make = Callable[[Sequence[Measured]], Figure]


def all_figures(runs: Sequence[Measured]) -> dict[str, Make]:
    """The figures that these runs can fill, by file stem."""
    can_fill: dict[str, tuple[Make, object]] = {
        "speedup": (speedup_figure, _faster_or_slower(runs)),
        "acceptance": (acceptance_figure, _accepting(runs)),
        "time": (time_figure, any(item.timed for item in runs)),
        "lookahead": (lookahead_figure, lookahead_groups(runs)),
        "exit_layers": (exit_layer_figure, exit_cells(runs)),
        "predicted": (predicted_figure, has_predictions(runs)),
    }
    return {name: make for name, (make, filled) in can_fill.items() if filled}


def speedup_figure(runs: Sequence[Measured]) -> Figure:
    """Paired speedup over AR, one row per method; a hollow point bears a mark: lossy, synthetic, or not AR's tokens."""
    rows = _faster_or_slower(runs)
    if not rows:
        raise UserError("only the baseline was measured, or no time; there is no speedup to draw: leave it out.")
    figure, axes = canvas(height_in=0.9 + 0.28 * len(rows))
    with style.context(["default", STYLE]):
        axes.axvline(1.0, color="0.4", linewidth=0.8)
        for place, (_, stats) in enumerate(rows):
            ratio, low, high = (stats[f"speedup_paired_geomean{end}"] for end in ("", "_low", "_high"))
            if low is not None:
                axes.plot([low, high], [place, place], color="black", linewidth=1.2, solid_capstyle="butt")
                for end in (low, high):
                    axes.plot([end, end], [place - 0.15, place + 0.15], color="black", linewidth=1.2)
            hollow = method_name("", stats) != ""
            axes.plot(ratio, place, "o", color="black", markerfacecolor="white" if hollow else "black", markersize=5)
        name_rows(axes, [label for label, _ in rows])
        axes.set_xlabel("speedup over AR (95% interval over prompts)")
        axes.grid(axis="y", visible=False)
    return figure


def acceptance_figure(runs: Sequence[Measured]) -> Figure:
    """A panel per drafter: acceptance of a position given that all before it were, and together with all before it.

    A drafter with several lookaheads shows its longest fixed one (a policy drafts long only where it expects to be
    right), and each of its trees.
    """
    rows = _accepting(runs)
    if not rows:
        raise UserError("no method drafted anything, so there is no acceptance to draw; leave this figure out.")
    with style.context(["default", STYLE]):
        figure, found = panels(len(rows), height_in=1.1)
        for axes, (label, stats) in zip(found, rows, strict=True):
            for name, legend, form, filling in (
                ("conditional_acceptance", "given all before it", "o-", "black"),
                ("joint_acceptance", "together with all before it", "s--", "white"),
            ):
                points = [(i + 1, rate) for i, rate in enumerate(stats[name]) if rate is not None]
                places, rates = zip(*points, strict=True)
                axes.plot(places, rates, form, color="black", markerfacecolor=filling, markersize=3.5, label=legend)
            axes.set_title(label.replace(" (", "\n("), fontsize=7)
            axes.set(ylim=(-0.05, 1.05), yticks=[0, 0.5, 1])
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.supxlabel("drafted position", fontsize=8)
        figure.supylabel("share accepted", fontsize=8)
        figure.legend(*found[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def time_figure(runs: Sequence[Measured]) -> Figure:
    """Milliseconds per emitted token, split by phase."""
    rows = _methods([item for item in runs if item.timed])
    figure, axes = canvas(height_in=1.2 + 0.28 * len(rows))
    with style.context(["default", STYLE]):
        left = [0.0] * len(rows)
        for name, label, grey, hatch in PHASES:
            widths = [1000 * _phase(stats, name) for _, stats in rows]
            if not any(widths):
                continue
            look: dict[str, Any] = {"color": grey, "hatch": hatch, "edgecolor": "black", "linewidth": 0.5}
            axes.barh(range(len(rows)), widths, 0.6, left, label=label, **look)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        name_rows(axes, [label for label, _ in rows])
        axes.set_xlim(0, 1.03 * max(left, default=1.0))  # bars of no width would take matplotlib's own margin away
        axes.set_xlabel("ms per emitted token")
        axes.grid(axis="y", visible=False)
        figure.legend(loc="outside lower center", ncols=len(PHASES))
    return figure


def _phase(stats: dict[str, Any], name: str) -> float:
    """Seconds per token; decode as a whole only where it was not split."""
    if name == "decode_s_per_token" and stats["draft_s_per_token"] is not None:
        return 0.0
    return float(stats[name] or 0.0)


def _accepting(runs: Sequence[Measured]) -> Methods:
    """What the acceptance figure shows of all that drafted something."""
    rows: Methods = []
    for item in runs:
        hidden = set()
        for group in groups_of(item):
            longest = group.by_k[max(group.by_k)] if group.by_k else None
            if longest is not None:
                hidden |= {one.label for one in group.methods if not one.is_tree and one is not longest}
        methods = [pair for pair in item.summary["methods"].items() if pair[0] not in hidden]
        rows += [(_label(name, stats, item, runs), stats) for name, stats in methods if stats["conditional_acceptance"]]
    return rows


def _faster_or_slower(runs: Sequence[Measured]) -> Methods:
    """What the speedup figure shows."""
    return [(label, stats) for label, stats in _methods(runs, False) if stats["speedup_paired_geomean"] is not None]


def _methods(runs: Sequence[Measured], with_baseline: bool = True) -> Methods:
    """(label, statistics) of every row; the run's name joins the label where there are several."""
    return [
        (_label(name, stats, item, runs), stats)
        for item in runs
        for name, stats in item.summary["methods"].items()
        if with_baseline or name != item.summary["baseline"]
    ]


def _label(name: str, stats: dict[str, Any], item: Measured, runs: Sequence[Measured]) -> str:
    return plain(method_name(name, stats) + told_apart(item, runs))
