"""Tables, figures and trace pages from run directories alone.

    python experiments/report.py runs=outputs/smollm2 format=latex out=tables/
    python experiments/report.py runs=wandb://<entity>/<project>/smollm2 format=latex out=tables/

The second fetches the run directories that were uploaded to W&B and makes the same bytes from them. `conf/report.yaml`
lists the options. Rebuilding gives the same bytes; every table names the runs it was made from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from selfspec.errors import UserError
from selfspec.report.build import build_report
from selfspec.run import entry_point
from selfspec.target.fetch import cache_root
from selfspec.tracking.wandb_fetch import SCHEME, fetch_runs


@entry_point("report")
def main(config: DictConfig) -> None:
    if OmegaConf.is_missing(config, "runs"):
        raise UserError("No value for runs. Give it on the command line: runs=outputs/<study>/<name>-<hash8>")
    given = OmegaConf.to_container(config, resolve=True)
    assert isinstance(given, dict)
    for path in build_report(
        at_hand(given["runs"], cache_root(given["cache"])),
        given["format"],
        given["out"],
        given["allow_mixed"],
        given["allow_unfinished"],
        given["allow_tuning"],
    ):
        print(path)


def at_hand(runs: Any, cache: Path) -> list[Any]:
    """The same runs on this machine: those of a W&B address as the folders that they were fetched into."""
    folders: list[Any] = []
    for one in runs if isinstance(runs, list) else [runs]:
        folders += fetch_runs(one, cache) if str(one).startswith(SCHEME) else [one]
    return folders


if __name__ == "__main__":
    main()
