"""Shows finished runs to a tracker afterwards: measured without one, or while its server did not answer.

    python experiments/mirror.py runs=outputs/smollm2 tracking=wandb

W&B knows a run by its config and directory, so showing one twice continues it instead of adding another.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from selfspec.config import CompareConfig, resolve
from selfspec.errors import UserError
from selfspec.mirror import mirror_run
from selfspec.records import read_run
from selfspec.report.runs import find_run_dirs
from selfspec.run import entry_point


@entry_point("mirror")
def main(config: DictConfig) -> None:
    if OmegaConf.is_missing(config, "runs"):
        raise UserError("No value for runs. Give it on the command line: runs=outputs/<study>/<name>-<hash8>")
    given: Any = OmegaConf.to_container(config, resolve=True)
    for folder in find_run_dirs(given["runs"]):
        run_config = resolve(CompareConfig, OmegaConf.create(read_run(folder).config))
        run_config.tracking = given["tracking"]
        mirror_run(folder, run_config)
        print(folder)


if __name__ == "__main__":
    main()
