"""The main job: AR, self-drafts, an independent draft and plain HF generate on the same prompts; a table at the end.

    python experiments/compare.py experiment=smollm2_quick

A killed run goes on where it stopped when started again; a finished one prints its table.
"""

from __future__ import annotations

from omegaconf import DictConfig

from selfspec.run import entry_point, run_compare


@entry_point("compare")
def main(config: DictConfig) -> None:
    run_compare(config)


if __name__ == "__main__":
    main()
