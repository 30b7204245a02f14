"""How all figures look: one column wide, no colour, and the same bytes each time.

PDF and PNG bytes depend on the records and the matplotlib version only: no dates, no random ids, bundled fonts. Marks,
dashes and hatches carry the meaning, grey only helps.
"""

from __future__ import annotations

import io
import math
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

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
WIDTH_IN = 5.5  # a text column
LINES = [
    ("o", "-"),
    ("s", "--"),
    ("^", "-."),
    ("D", ":"),
    ("v", (0, (5, 1))),
    ("P", (0, (3, 1, 1, 1))),
    ("X", (0, (1, 2))),
]
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "*", "h")
PER_ROW = 4  # panels side by side


def to_bytes(figure: Figure, file_format: str) -> bytes:
    """`figure` as "pdf" or "png"."""
    out = io.BytesIO()
    with style.context(["default", STYLE]):
        figure.savefig(out, format=file_format, metadata=METADATA[file_format])
    return out.getvalue()


def canvas(height_in: float) -> tuple[Figure, Axes]:
    """A figure with one plot."""
    with style.context(["default", STYLE]):
        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
        FigureCanvasAgg(figure)
        return figure, figure.subplots()


def panels(number: int, height_in: float, extra_in: float = 0.5) -> tuple[Figure, list[Axes]]:
    """A figure with so many small plots of `height_in` in rows of four, on common axes; `extra_in` below for a legend.

    To be called, like all drawing, inside `style.context(["default", STYLE])`.
    """
    columns = min(PER_ROW, number)
    rows = math.ceil(number / columns)
    figure = Figure(figsize=(WIDTH_IN, rows * height_in + extra_in), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    found = [axes for row in grid for axes in row]
    for axes in found[number:]:
        axes.set_visible(False)
    for axes in found[max(number - columns, 0) : number]:
        axes.xaxis.set_tick_params(labelbottom=True)  # also where the row below is not full
    return figure, found[:number]


def name_rows(axes: Axes, labels: list[str]) -> None:
    """One label per row, the first on top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)


def plain(text: str) -> str:
    """Text as it stands: a dollar begins no formula."""
    return text.replace("$", r"\$")
