"""Three figures from run directories, readable in greyscale: marks and hatches carry the meaning, grey only helps.

    speedup      paired speedup over AR with its interval, per method
    acceptance   how often each drafted position is accepted: conditional (what the draft can do) and joint
    time         where the time of one emitted token goes

PDF and PNG bytes depend on the records and the matplotlib version only: no dates, no random ids, bundled fonts.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from selfspec.errors import UserError
from selfspec.report.runs import Measured

STYLE: Any = {
    "font.family": "DejaVu Sans",  # bundled with matplotlib: the same glyphs on every machine
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "0.9",
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "pdf.fonttype": 42,  # text stays text
    "savefig.dpi": 200,
}
METADATA: dict[str, dict[str, Any]] = {
    "pdf": {"CreationDate": None, "ModDate": None, "Producer": None, "Creator": "selfspec"},
    "png": {"Software": None},
}
LINES = [
    ("o", "-"),
    ("s", "--"),
    ("^", "-."),
    ("D", ":"),
    ("v", (0, (5, 1))),
    ("P", (0, (3, 1, 1, 1))),
    ("X", (0, (1, 2))),
]
PHASES = [  # statistic, legend, grey, hatch
    ("prefill_s_per_token", "prefill", "1.0", ""),
    ("draft_s_per_token", "draft", "0.75", "////"),
    ("verify_s_per_token", "verify", "0.35", ""),
    ("other_s_per_token", "other", "0.9", "...."),
    ("decode_s_per_token", "decode, not split", "0.6", "xxxx"),
]
WIDTH_IN = 5.5  # a text column
Methods = list[tuple[str, dict[str, Any]]]
Make = Callable[[Sequence[Measured]], Figure]


def all_figures(runs: Sequence[Measured]) -> dict[str, Make]:
    """The figures that these runs can fill, by file stem."""
    figures: dict[str, Make] = {"speedup": speedup_figure, "acceptance": acceptance_figure, "time": time_figure}
    if not any(stats["conditional_acceptance"] for _, stats in _methods(runs)):
        del figures["acceptance"]
    if not _methods(runs, with_baseline=False):
        del figures["speedup"]
    return figures


def to_bytes(figure: Figure, file_format: str) -> bytes:
    """`figure` as "pdf" or "png"."""
    out = io.BytesIO()
    with style.context(["default", STYLE]):
        figure.savefig(out, format=file_format, metadata=METADATA[file_format])
    return out.getvalue()


def speedup_figure(runs: Sequence[Measured]) -> Figure:
    """Paired speedup over AR, one row per method; a hollow point is lossy or synthetic."""
    rows = [(label, stats) for label, stats in _methods(runs, False) if stats["speedup_paired_geomean"] is not None]
    if not rows:
        raise UserError("only the baseline was measured, so there is no speedup to draw; leave this figure out.")
    figure, axes = _canvas(height_in=0.9 + 0.28 * len(rows))
    with style.context(["default", STYLE]):
        axes.axvline(1.0, color="0.4", linewidth=0.8)
        for place, (_, stats) in enumerate(rows):
            ratio, low, high = (stats[f"speedup_paired_geomean{end}"] for end in ("", "_low", "_high"))
            if low is not None:
                axes.plot([low, high], [place, place], color="black", linewidth=1.2, solid_capstyle="butt")
                for end in (low, high):
                    axes.plot([end, end], [place - 0.15, place + 0.15], color="black", linewidth=1.2)
            hollow = stats["lossy"] or stats["synthetic"]
            axes.plot(ratio, place, "o", color="black", markerfacecolor="white" if hollow else "black", markersize=5)
        _name_rows(axes, [label for label, _ in rows])
        axes.set_xlabel("speedup over AR (paired geometric mean, 95% interval over prompts)")
        axes.grid(axis="y", visible=False)
    return figure


def acceptance_figure(runs: Sequence[Measured]) -> Figure:
    """Left: acceptance of a position given that all before it were accepted. Right: of all positions up to it."""
    rows = [(label, stats) for label, stats in _methods(runs) if stats["conditional_acceptance"]]
    if not rows:
        raise UserError("no method drafted anything, so there is no acceptance to draw; leave this figure out.")
    with style.context(["default", STYLE]):
        figure = Figure(figsize=(WIDTH_IN, 2.4), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2, sharex=True, sharey=True)
        for index, (label, stats) in enumerate(rows):
            marker, dashes = LINES[index % len(LINES)]
            grey = str(round(0.55 * (index / max(1, len(rows) - 1)), 2))
            for axes, name in ((left, "conditional_acceptance"), (right, "joint_acceptance")):
                points = [(i + 1, rate) for i, rate in enumerate(stats[name]) if rate is not None]
                look = {"marker": marker, "linestyle": dashes, "color": grey, "markersize": 4}
                axes.plot(*zip(*points, strict=True), label=label, **look)
        left.set(ylabel="share accepted", title="given all before it", ylim=(-0.03, 1.03))
        right.set(title="together with all before it")
        for axes in (left, right):
            axes.set_xlabel("drafted position")
            axes.xaxis.get_major_locator().set_params(integer=True)
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=min(4, len(rows)))
    return figure


def time_figure(runs: Sequence[Measured]) -> Figure:
    """Milliseconds per emitted token, split by phase."""
    rows = _methods(runs)
    figure, axes = _canvas(height_in=1.2 + 0.28 * len(rows))
    with style.context(["default", STYLE]):
        left = [0.0] * len(rows)
        for name, label, grey, hatch in PHASES:
            widths = [1000 * _phase(stats, name) for _, stats in rows]
            if not any(widths):
                continue
            look: dict[str, Any] = {"color": grey, "hatch": hatch, "edgecolor": "black", "linewidth": 0.5}
            axes.barh(range(len(rows)), widths, 0.6, left, label=label, **look)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        _name_rows(axes, [label for label, _ in rows])
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


def _canvas(height_in: float) -> tuple[Figure, Axes]:
    with style.context(["default", STYLE]):
        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
        FigureCanvasAgg(figure)
        return figure, figure.subplots()


def _name_rows(axes: Axes, labels: list[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)  # first method on top


def _methods(runs: Sequence[Measured], with_baseline: bool = True) -> Methods:
    """(label, statistics) of every row; the run's hash joins the label where there are several runs."""
    rows = []
    for item in runs:
        for name, stats in item.summary["methods"].items():
            if name == item.summary["baseline"] and not with_baseline:
                continue
            mark = "†" * stats["lossy"] + "‡" * stats["synthetic"]
            run = f" ({item.run.config_hash})" if len(runs) > 1 else ""
            rows.append((f"{name}{mark}{run}".replace("$", r"\$"), stats))
    return rows
