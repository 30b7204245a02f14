"""From what a user typed to the runs of one table: folders, globs, checks, and each run's summary from its records."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfspec.errors import UserError
from selfspec.records import Run, read_run
from selfspec.report.checks import check_together
from selfspec.report.statistics import BASELINE, summarise, without_times


@dataclass(frozen=True)
class Measured:
    """A run with its summary, recomputed from the records, so that a table never repeats a stale number.

    name: what a table calls it, its folder's name and as much of the path before as sets it apart from the other runs.
    """

    run: Run
    summary: dict[str, Any]
    name: str

    @property
    def timed(self) -> bool:
        """Whether its times count; if not, its summary holds none."""
        return is_timed(self.run)

    @property
    def label(self) -> str:
        """How the run is named in a table, and what a reader must know about it."""
        noise = self.summary["noise_check"]
        marks = [] if self.run.finished else ["unfinished"]
        marks += ["tuning prompts"] if self.run.only_tuning else []
        marks += ["noisy"] if noise and noise["noisy"] else []
        marks += [] if self.timed else ["untimed"]
        return self.name + (f" ({', '.join(marks)})" if marks else "")


def told_apart(item: Measured, runs: Sequence[Measured]) -> str:
    """What a row says of its run beside rows of others: nothing of the only run, else its name, and the hash with it
    where another has that name too. No two runs say the same.
    """
    if len(runs) < 2:
        return ""
    names, stems = [one.name for one in runs], [one.name.rpartition("-")[0] for one in runs]
    stem = item.name.rpartition("-")[0]
    return f" ({stem if stem and stems.count(stem) == 1 and stem not in names else item.name})"


def load_runs(
    specs: str | Path | Sequence[str | Path],
    allow_mixed: bool = False,
    allow_unfinished: bool = False,
    allow_tuning: bool = False,
) -> list[Measured]:
    """Every run directory that `specs` name: run directories, folders of them at any depth, or globs.

    Raises `UserError` for a name without a run behind it, an unfinished run (unless `allow_unfinished`, then it is
    marked), runs of different machines (unless `allow_mixed`), a run on prompts for choosing settings (unless
    `allow_tuning`), or a run without the autoregressive baseline.
    """
    runs = [read_run(path, allow_unfinished) for path in find_run_dirs(specs)]
    check_together(runs, allow_mixed)
    if tuning := [run.name for run in runs if run.only_tuning and not allow_tuning]:
        raise UserError(
            f"{tuning[0]} was measured on prompts for choosing settings; what was chosen on them reads too high. "
            "Report from others (prompts.split=report), compare settings with format=sweep, or pass allow_tuning=true."
        )
    names = apart([run.path.resolve() for run in runs])
    return [measured(run, name) for run, name in zip(runs, names, strict=True)]


def is_timed(run: Run) -> bool:
    return (run.config.get("measure") or {}).get("timed") is not False


def apart(paths: Sequence[Path]) -> list[str]:
    """The end of each path: its last part, with as many before it as it takes for all to differ."""
    for depth in range(1, max((len(path.parts) for path in paths), default=1)):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def measured(run: Run, name: str | None = None) -> Measured:
    """Checks every record of one run and computes its summary; `name` as in `Measured`."""
    if not run.prompts:
        raise UserError(f"{run.path} holds no results yet; resume it first.")
    methods = sorted({record.method for record in run.prompts})
    if BASELINE not in methods:
        raise UserError(
            f"{run.path} has no {BASELINE!r} results to compare with (it has: {', '.join(methods)}); "
            "measure the baseline in the same run."
        )
    summary = summarise(run.prompts, run=str(run.path), references=run.references, score=run.score)
    return Measured(run, summary if is_timed(run) else without_times(summary), name or run.path.resolve().name)


def find_run_dirs(specs: str | Path | Sequence[str | Path]) -> list[Path]:
    """Run directories in the order given; inside a folder or a glob sorted by name; each once."""
    found: dict[Path, Path] = {}
    listed = [specs] if isinstance(specs, str | Path) else specs
    if not isinstance(listed, Sequence) or not all(isinstance(spec, str | Path) for spec in listed):
        raise UserError(f"runs={specs} names no folder; pass outputs/<study>/<name>-<hash8>, or a list of such names.")
    for spec in listed:
        matches = [Path(match) for match in sorted(glob.glob(str(spec)))] if not Path(spec).exists() else [Path(spec)]
        inside = [path for match in matches for path in _run_dirs_in(match)]
        if not inside:
            raise UserError(
                f"no run directory at {str(spec)!r}; pass outputs/<study>/<name>-<hash8>, a folder of runs, or a glob."
            )
        for path in inside:
            found.setdefault(path.resolve(), path)
    return list(found.values())


def _run_dirs_in(path: Path) -> list[Path]:
    if (path / "prompts.jsonl").exists() or (path / "DONE").exists():
        return [path]
    return sorted({file.parent for name in ("prompts.jsonl", "DONE") for file in path.rglob(name)})
