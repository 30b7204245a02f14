"""How far to look, decided by measuring: which drafter, exit layer, K, tree and policy is fastest for a target here.

    python experiments/tune.py
    python experiments/tune.py 'drafters=[eagle3,ngram]' top=4

Four steps, told in `selfspec.tuning.tuner`: costs, rounds, candidates, confirm. Killed at any time, the same command
goes on. `out` gets tune.md, tune.json, and the winner as files that Hydra finds with --config-dir.
"""

from __future__ import annotations

from omegaconf import DictConfig

from selfspec.config import resolve
from selfspec.run import entry_point
from selfspec.tuning.settings import TuneConfig
from selfspec.tuning.tuner import run_tuner


@entry_point("tune")
def main(composed: DictConfig) -> None:
    run_tuner(resolve(TuneConfig, composed))


if __name__ == "__main__":
    main()
