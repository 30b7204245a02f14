"""One table in three forms: the console, Markdown, and LaTeX with booktabs. The same table gives the same bytes."""

from __future__ import annotations

import re
import sys

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from selfspec.report.tables import Block, Table

PIPE_WIDTH = 100
ASCII_HEAD = box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
INTERVAL = re.compile(r" \[(\S+), (\S+)\]")
ASCII = str.maketrans({"τ": "tau", "α": "alpha", "Σ": "sum", "—": "-", "–": "-", "†": "+", "‡": "#"})
LATEX = str.maketrans(
    {
        **{char: f"\\{char}" for char in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        '"': "''",
        "[": "{[}",  # a row that starts with [ would be read as the argument of the line break before it
        "—": "--",
        "†": r"\textsuperscript{\dag}",
        "‡": r"\textsuperscript{\ddag}",
        "*": r"\textsuperscript{*}",
        "τ": r"$\tau$",
        "α": r"$\alpha$",
        "Σ": r"$\sum$",
        "\n": " ",
    }
)
MARKDOWN = str.maketrans({**{char: f"\\{char}" for char in "\\|*`<>~[]#"}, "\n": " "})


def print_table(table: Table, console: Console | None = None, notes: bool = True) -> None:
    """For people: made for 100 columns, folded on narrower terminals, plain text in a pipe."""
    if console is None:
        console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
    plain = not (console.encoding or "").lower().startswith("utf")
    lines = [table.caption, *table.notes] if notes else []
    for block in table.blocks:
        console.print(Text(_plain(block.label, plain), style="bold"))
        console.print(_grid(table, block, console.width, plain), end="")
    console.print(*(Text(_plain(line, plain), style="dim") for line in lines), sep="\n")


def _grid(table: Table, block: Block, width: int, plain: bool) -> RichTable:
    """One block; all blocks get the same column widths. Intervals move to a second line where the width asks for it."""
    rows = [row for other in table.blocks for row in other.rows]
    stacked = sum(_widths([table.header, *rows])) + 2 * len(table.header) > width
    if stacked:
        rows = [[INTERVAL.sub("\n\\1–\\2", cell) for cell in row] for row in rows]
    widths = _widths([table.header, *rows])
    fits = sum(widths) + 2 * len(widths) <= width
    grid = RichTable(
        box=ASCII_HEAD if plain else box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for index, (name, column_width) in enumerate(zip(table.header, widths, strict=True)):
        grid.add_column(
            Text(_plain(name, plain)),
            justify="left" if index == 0 else "right",
            vertical="bottom",
            no_wrap=fits,
            overflow="fold",
            min_width=column_width if fits else None,
        )
    for row in block.rows:
        shown = [INTERVAL.sub("\n\\1–\\2", cell) if stacked else cell for cell in row]
        grid.add_row(*(Text(_plain(cell, plain), style="bold" * (index == 0)) for index, cell in enumerate(shown)))
    return grid


def _widths(rows: list[list[str]]) -> list[int]:
    return [max(cell_len(line) for cell in column for line in cell.split("\n")) for column in zip(*rows, strict=True)]


def _plain(text: str, plain: bool) -> str:
    return text.translate(ASCII).encode("ascii", "replace").decode() if plain else text


def to_markdown(table: Table) -> str:
    """A GitHub table with its caption above and its notes below."""
    lines = [_markdown(table.caption), ""]
    for block in table.blocks:
        lines += [f"**{_markdown(block.label)}**", ""]
        lines.append(_markdown_row(table.one_line_header))
        lines.append("|" + "|".join([":--"] + ["--:"] * (len(table.header) - 1)) + "|")
        lines += [_markdown_row(row) for row in block.rows]
        lines.append("")
    lines += [f"- {_markdown(note)}" for note in table.notes]
    return "\n".join(lines) + "\n"


def _markdown(text: str) -> str:
    return text.translate(MARKDOWN)


def _markdown_row(cells: list[str]) -> str:
    return "| " + " | ".join(_markdown(cell) for cell in cells) + " |"


def to_latex(table: Table) -> str:
    """A table environment for `\\input`; needs only the booktabs package."""
    columns = len(table.header)
    lines = [
        "% made by experiments/report.py; needs \\usepackage{booktabs}",
        *(f"% run {_comment(block.label)}" for block in table.blocks),
        "\\begin{table}[t]",
        "\\centering",
        "\\small",
        f"\\begin{{tabular}}{{l{'r' * (columns - 1)}}}",
        "\\toprule",
        _latex_row(table.one_line_header),
    ]
    for block in table.blocks:
        lines.append("\\midrule")
        if len(table.blocks) > 1:
            lines.append(f"\\multicolumn{{{columns}}}{{l}}{{\\emph{{{_latex(block.label)}}}}} \\\\")
        lines += [_latex_row(row) for row in block.rows]
    lines += [
        "\\bottomrule",
        "\\end{tabular}",
        "\\par\\smallskip",
        "\\begin{minipage}{\\linewidth}\\footnotesize",
        *(f"{_latex(note)}\\par" for note in table.notes),
        "\\end{minipage}",
        f"\\caption{{{_latex(table.caption)}}}",
        f"\\label{{tab:{table.name}}}",
        "\\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _latex(text: str) -> str:
    return text.translate(LATEX)


def _comment(text: str) -> str:
    return " ".join(text.split())


def _latex_row(cells: list[str]) -> str:
    return " & ".join(_latex(cell) for cell in cells) + r" \\"
