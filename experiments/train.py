"""Train a draft for a target: python experiments/train.py drafter=independent data=data/smollm2 out=drafts/mine"""

from __future__ import annotations

import sys
import time
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from selfspec.config import conf_dir
from selfspec.errors import UserError
from selfspec.target import load_target
from selfspec.training.config import TrainJobConfig, resolve_job
from selfspec.training.job import train_draft


def report(record: dict[str, Any]) -> None:
    facts = "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in record.items()
    )
    print(f"{time.strftime('%H:%M:%S')}  {facts}", flush=True)


@hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="train")
def main(composed: DictConfig) -> None:
    try:
        job = resolve_job(TrainJobConfig, composed)
        if job.runtime.num_threads:
            torch.set_num_threads(job.runtime.num_threads)
        target = load_target(job.target, dtype=job.runtime.dtype, device=job.runtime.device, fused=False)
        target.name = HydraConfig.get().runtime.choices["target"]
        command = "python experiments/train.py " + " ".join(sys.argv[1:])
        kind = str(job.drafter.get("kind"))
        train_draft(target, kind, job.draft, job.train, job.data, job.out, command, report)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
