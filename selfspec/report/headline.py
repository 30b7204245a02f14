"""The headline table of a README, put between two marks by the build and by nobody's hand."""

from __future__ import annotations

import io

from rich.console import Console

from selfspec.errors import UserError
from selfspec.report.render import print_table
from selfspec.report.runs import Measured
from selfspec.report.tables import comparison_table

WIDTH = 112  # a page shows it in a box that scrolls
START, END = "<!-- table:start -->", "<!-- table:end -->"


def headline(run: Measured, command: str, folder: str) -> str:
    """What stands between the marks: the run's table as the console shows it, and where it came from."""
    out = io.StringIO()
    print_table(comparison_table([run]), Console(file=out, width=WIDTH, highlight=False, no_color=True))
    table = "\n".join(line.rstrip() for line in out.getvalue().splitlines())
    return (
        f"`make paper` wrote this from the run `{run.name}`, that is `{command}`; all tables and "
        f"figures of the study are in [{folder}]({folder}):\n\n```\n{table}\n```"
    )


def fill_in(readme: str, text: str, name: str) -> str:
    """The README with `text` between its marks. UserError unless each mark is there once, in order."""
    if readme.count(START) != 1 or readme.count(END) != 1 or readme.index(START) > readme.index(END):
        raise UserError(f"{name} needs one line {START} and, after it, one line {END}: the table goes between them.")
    before, rest = readme.split(START)
    after = rest.split(END)[1]
    return f"{before}{START}\n\n{text}\n\n{END}{after}"
