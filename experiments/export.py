"""A draft for another project: python experiments/export.py draft=drafts/eagle3 format=speculators out=eagle3-vllm"""

from __future__ import annotations

import sys

import hydra
from omegaconf import DictConfig

from selfspec.config import conf_dir
from selfspec.errors import UserError
from selfspec.target import load_target
from selfspec.training.config import resolve_job
from selfspec.training.export.jobs import ExportConfig, export_draft


@hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="export")
def main(composed: DictConfig) -> None:
    try:
        job = resolve_job(ExportConfig, composed)
        target = load_target(job.target, dtype="float32", device="cpu", fused=False)
        export_draft(target, job.draft, job.format, job.out, job.verifier)
    except UserError as error:
        sys.exit(f"error: {error}")
    print(f"{job.out}: {job.draft} in the {job.format} format")


if __name__ == "__main__":
    main()
