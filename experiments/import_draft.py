"""Another project's draft as one of ours: python experiments/import_draft.py draft=downloads/eagle3 out=drafts/mine"""

from __future__ import annotations

import sys

import hydra
from omegaconf import DictConfig

from selfspec.config import conf_dir
from selfspec.errors import UserError
from selfspec.target import load_target
from selfspec.training.config import resolve_job
from selfspec.training.export.jobs import ImportConfig, import_draft


@hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="import_draft")
def main(composed: DictConfig) -> None:
    try:
        job = resolve_job(ImportConfig, composed)
        target = load_target(job.target, dtype="float32", device="cpu", fused=False)
        config = import_draft(target, job.draft, job.out, job.feature_layers)
    except UserError as error:
        sys.exit(f"error: {error}")
    print(f"{job.out}: {config['kind']} draft for {target.name}")


if __name__ == "__main__":
    main()
