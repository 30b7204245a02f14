"""From run directories to files: what `experiments/report.py` does, as a function.

console   both tables, printed
markdown  comparison.md, categories.md, and costs.md of finished runs
latex     the same as .tex
sweep     sweep.md: every setting of these runs, fastest first, corrected for having looked at all
policies  policies.md, .tex and .csv: how much of what its drafts allow each lookahead policy reaches
csv       statistics.csv: every estimator, overall and per category
figures   what these runs can fill of speedup, acceptance, time, lookahead, exit_layers, predicted: .pdf and .png
trace     trace-<run>.html, from the traces.jsonl of each run that has one
all       all of these
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from selfspec.errors import UserError
from selfspec.records import read_traces, writable, write_atomic
from selfspec.report.costs import cost_table, has_costs
from selfspec.report.figures import all_figures, to_bytes
from selfspec.report.policies import has_policies, policies_csv, policy_table
from selfspec.report.render import print_table, to_latex, to_markdown
from selfspec.report.runs import Measured, load_runs
from selfspec.report.sweep import sweep_table
from selfspec.report.tables import Table, category_table, comparison_table, to_csv
from selfspec.report.trace import trace_page

FORMATS = ("console", "markdown", "latex", "csv", "figures", "trace", "sweep", "policies", "all")
ALL = ("console", "markdown", "latex", "csv", "figures", "trace", "policies")  # of those that these runs can fill


def build_report(
    runs: str | Path | Sequence[str | Path],
    formats: str | Sequence[str] = "console",
    out: str | Path = "tables",
    allow_mixed: bool = False,
    allow_unfinished: bool = False,
    allow_tuning: bool = False,
) -> list[Path]:
    """Writes (and prints) what `formats` names; returns the files. Nothing is written unless everything could be made.

    Raises `UserError` for an unknown format and for whatever `load_runs` refuses.
    """
    wanted = [formats] if isinstance(formats, str) else list(formats)
    for name in wanted:
        if name not in FORMATS:
            raise UserError(f"format={name} is unknown; allowed: {', '.join(FORMATS)}, or a list of them.")
    if not wanted:
        raise UserError(f"no format given; allowed: {', '.join(FORMATS)}, or a list of them.")
    loaded = load_runs(runs, allow_mixed, allow_unfinished, allow_tuning or wanted == ["sweep"])
    wanted = list(ALL) if "all" in wanted else wanted
    files = dict(_files(loaded, wanted, strict="all" not in formats))
    folder = Path(out)
    with writable(folder, "out"):
        if files:
            folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomic(folder / name, content)
    if "console" in wanted:
        print_table(comparison_table(loaded))
        print()
        print_table(category_table(loaded), notes=False)
    if "sweep" in wanted:
        print_table(sweep_table(loaded))
    if "policies.md" in files:
        print_table(policy_table(loaded))
    return [folder / name for name in files]


def _files(runs: Sequence[Measured], wanted: Sequence[str], strict: bool) -> Iterator[tuple[str, str | bytes]]:
    tables: tuple[Table, ...] = (comparison_table(runs), category_table(runs))
    if has_costs(runs):
        tables += (cost_table(runs),)
    if "markdown" in wanted:
        yield from ((f"{table.name}.md", to_markdown(table)) for table in tables)
    if "latex" in wanted:
        yield from ((f"{table.name}.tex", to_latex(table)) for table in tables)
    if "sweep" in wanted:
        yield "sweep.md", to_markdown(sweep_table(runs))
    if "policies" in wanted and (strict or has_policies(runs)):
        table = policy_table(runs)
        yield "policies.md", to_markdown(table)
        yield "policies.tex", to_latex(table)
        yield "policies.csv", policies_csv(runs)
    if "csv" in wanted:
        yield "statistics.csv", to_csv(runs)
    if "figures" in wanted:
        for name, make in all_figures(runs).items():
            for file_format in ("pdf", "png"):
                yield f"{name}.{file_format}", to_bytes(make(runs), file_format)
    if "trace" in wanted:
        traced = [item for item in runs if (item.run.path / "traces.jsonl").exists()]
        if not traced and strict:
            raise UserError(
                "no run holds traces.jsonl, so there is no trace page to make; measure with measure.trace=1 or more, "
                "or drop format=trace."
            )
        for item in traced:
            page = trace_page(read_traces(item.run.path / "traces.jsonl"), f"Trace of {item.name}")
            yield trace_file(item), page


def trace_file(item: Measured) -> str:
    """What a run's trace page is called."""
    return f"trace-{item.name.replace('/', '_')}.html"
