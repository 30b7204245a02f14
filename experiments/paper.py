"""A study from nothing to its tables: measure every experiment, build every table and figure, fill in the README.

    python experiments/paper.py

Each experiment is measured by `compare.py` in a process of its own, so that none inherits the other's memory; killed
at any point, the same command goes on. Where only this process was killed, the measurement that it began is still under
way and is waited for. The tables are made from the run directories alone, byte for byte the same when made again. What
earlier runs of the study have left in `out` goes; `made_from.json` there says which runs each file is of.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from selfspec.config import CompareConfig, conf_dir, resolve, typed
from selfspec.errors import UserError
from selfspec.records import wait_for_lock, writable, write_atomic
from selfspec.report.build import build_report
from selfspec.report.headline import fill_in, headline
from selfspec.report.origins import origins, remove_leftovers
from selfspec.report.runs import load_runs
from selfspec.run import choose_folder, entry_point, settle_runtime

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class PaperConfig:
    """conf/paper.yaml."""

    experiments: list[str]
    out: str
    formats: list[str]
    overrides: list[str] = field(default_factory=list)
    readme: str | None = None


@entry_point("paper")
def main(composed: DictConfig) -> None:
    config = typed(PaperConfig, composed)
    if not config.experiments:
        raise UserError("experiments=[] names nothing to measure. Give names of conf/experiment.")
    arguments = [[f"experiment={name}", *config.overrides] for name in config.experiments]
    configs = [settled(one) for one in arguments]  # every config is checked before the first is measured
    folders = [choose_folder(one) for one in configs]
    with alone(Path(config.out)) as lock:
        for one, settings, folder in zip(arguments, configs, folders, strict=True):
            if not (folder / "DONE").exists():
                measure(decided(one, settings), lock)
        files = build(folders, config)
    if config.readme:
        path = ROOT / config.readme
        (headlined,) = load_runs(folders[0])
        text = headline(headlined, f"python experiments/compare.py {' '.join(arguments[0])}", config.out)
        write_atomic(path, fill_in(path.read_text(), text, str(path)))
        files.append(path)
    for file in files:
        print(file)


def settled(arguments: list[str]) -> CompareConfig:
    """What `compare.py` with these arguments measures here."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = resolve(CompareConfig, compose("compare", arguments))
    settle_runtime(config)
    return config


def decided(arguments: list[str], config: CompareConfig) -> list[str]:
    """The arguments for a process of its own, which is not to time `fastest` again and come to another answer."""
    return [*arguments, f"runtime.dtype={config.runtime.dtype}"]


def build(folders: list[Path], config: PaperConfig) -> list[Path]:
    """The study's files, and `out` without those that earlier runs have left there."""
    files = build_report(folders, config.formats, config.out)
    runs = load_runs(folders)
    for path in remove_leftovers(Path(config.out), origins(files, runs), runs):
        print(f"removed {path}: it was made from a run that this study no longer has")
    return files


@contextmanager
def alone(out: Path) -> Iterator[int]:
    """Waits until no other study is measured for `out`; yields the lock, which lasts as long as any process has it."""

    def waiting(holder: str) -> None:
        print(f"{out} is being measured for by {holder}, or by what was left of it when killed; waiting for its end")

    with writable(out, "out"):
        lock = wait_for_lock(out, waiting)
    with lock:
        yield lock.fileno()


def measure(arguments: list[str], lock: int) -> None:
    """compare.py with these arguments, holding the lock too. UserError when it fails."""
    command = [sys.executable, str(ROOT / "experiments" / "compare.py"), *arguments]
    done = subprocess.run(command, check=False, pass_fds=[lock])
    if done.returncode != 0:
        raise UserError(f"{' '.join(arguments)} was not measured (exit code {done.returncode}); no table is built.")


if __name__ == "__main__":
    main()
