"""How a run is shown to its tracker, and what it hands over beside numbers: its records, its drafts, its figures.

Figures are made from the run directory as `experiments/report.py` makes them, and lie in its `figures/` afterwards.
Cost: a few seconds of drawing, only where a tracker wants figures, when everything has been timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selfspec.config import CompareConfig, canonical, config_hash
from selfspec.records import read_run, write_atomic
from selfspec.report.figures import all_figures, to_bytes
from selfspec.report.runs import measured
from selfspec.tracking import Tracker, log_result, tracker_from_config, wanted_artifacts

RECORD_FILES = (
    "config.yaml", "overrides.yaml", "provenance.json", "prompt_set.jsonl", "prompts.jsonl", "rounds.jsonl",
    "traces.jsonl", "summary.json", "DONE",
)  # fmt: skip


@contextmanager
def tracked(tracker: Tracker, config: CompareConfig, folder: Path) -> Iterator[Tracker]:
    """The tracker, started, and always finished: as failed if the block raises."""
    tracker.start(
        canonical(config),
        run_name=config.name,
        group=config.study,
        job_type="compare",
        run_dir=folder,
        config_hash=config_hash(config),
    )
    exit_code = 1
    try:
        yield tracker
        exit_code = 0
    finally:
        tracker.finish(exit_code)


def mirror_run(folder: Path, config: CompareConfig) -> None:
    """Shows a finished run to its tracker, as it would have been shown while it was measured."""
    run = read_run(folder)
    with tracked(tracker_from_config(config.tracking), config, folder) as tracker:
        for record in run.prompts:
            log_result(tracker, record)
        tracker.summary(run.summary or {})
        keep_files(tracker, config, folder)


def keep_files(tracker: Tracker, config: CompareConfig, folder: Path) -> None:
    """Hands over what conf/tracking's `artifacts` names."""
    wanted = wanted_artifacts(config.tracking)
    if "records" in wanted:
        tracker.keep("records", folder.name, [folder / name for name in RECORD_FILES if (folder / name).exists()])
    if "drafts" in wanted:
        for label, draft in draft_folders(config).items():
            tracker.keep("drafts", label, [draft])
    if "figures" in wanted:
        tracker.keep("figures", folder.name, draw_figures(folder))


def draft_folders(config: CompareConfig) -> dict[str, Path]:
    """The drafts that lie in a folder of this machine, by label; not those by conf name or hub id."""
    folders = {}
    for label, drafter in config.drafters.items():
        given = drafter.get("checkpoint") or drafter.get("model")
        if isinstance(given, str) and Path(given).expanduser().is_dir():
            folders[label] = Path(given).expanduser()
    return folders


def draw_figures(folder: Path) -> list[Path]:
    runs = [measured(read_run(folder))]
    paths = []
    (folder / "figures").mkdir(exist_ok=True)
    for name, make in all_figures(runs).items():
        for file_format in ("pdf", "png"):
            path = folder / "figures" / f"{name}.{file_format}"
            write_atomic(path, to_bytes(make(runs), file_format))
            paths.append(path)
    return paths
