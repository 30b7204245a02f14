"""Tables, figures and trace pages from run directories alone.

    python experiments/report.py runs=outputs/smollm2 format=latex out=tables/

`conf/report.yaml` lists the options. Rebuilding gives the same bytes; every table names the runs it was made from.
"""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from selfspec.errors import UserError
from selfspec.report.build import build_report
from selfspec.run import entry_point


@entry_point("report")
def main(config: DictConfig) -> None:
    if OmegaConf.is_missing(config, "runs"):
        raise UserError("No value for runs. Give it on the command line: runs=outputs/<study>/<name>-<hash8>")
    given = OmegaConf.to_container(config, resolve=True)
    assert isinstance(given, dict)
    for path in build_report(
        given["runs"],
        given["format"],
        given["out"],
        given["allow_mixed"],
        given["allow_unfinished"],
        given["allow_tuning"],
    ):
        print(path)


if __name__ == "__main__":
    main()
