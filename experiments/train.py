"""Train a draft for a target: python experiments/train.py drafter=independent data=data/smollm2 out=drafts/mine

Several processes share each step: torchrun --nproc-per-node=2 experiments/train.py ... train.accumulate=2
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from selfspec.config import conf_dir
from selfspec.errors import UserError
from selfspec.target import load_target
from selfspec.tracking import Tracker, tracker_from_config
from selfspec.training.config import TrainJobConfig, resolve_job, settled_dtype
from selfspec.training.job import train_draft
from selfspec.training.processes import Processes, joined
from selfspec.training.progress import TrainingDisplay


def run(job: TrainJobConfig, tracker: Tracker, processes: Processes) -> None:
    if job.runtime.num_threads:
        torch.set_num_threads(job.runtime.num_threads)
    dtype = settled_dtype(job.runtime, processes)
    target = load_target(job.target, dtype=dtype, device=job.runtime.device, fused=False)
    target.name = HydraConfig.get().runtime.choices["target"]
    command = "python experiments/train.py " + " ".join(sys.argv[1:])
    kind = str(job.drafter.get("kind"))
    with TrainingDisplay(job.train.steps) as display:

        def report(record: dict[str, Any]) -> None:
            if not processes.first:
                return
            display(record)
            numbers = {name: float(value) for name, value in record.items() if isinstance(value, int | float)}
            if "step" in record:
                tracker.log(numbers, step=int(record["step"]))

        options = job.draft_options()
        summary = train_draft(
            target, kind, options, job.train, job.data, job.out, command, report, processes, job.data_shards
        )
    if processes.first:
        tracker.summary(summary)
        folder = Path(job.out).expanduser()
        tracker.keep("drafts", folder.name, [folder])


@hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="train")
def main(composed: DictConfig) -> None:
    try:
        job = resolve_job(TrainJobConfig, composed)
        with joined(job.runtime.device) as processes:
            tracker = tracker_from_config(job.tracking if processes.first else {"kind": "none"})
            config: Any = OmegaConf.to_container(OmegaConf.structured(job))
            digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
            folder = Path(job.out).expanduser()
            names = {"run_name": folder.name, "group": job.target.kind, "job_type": "train"}
            tracker.start(config, **names, run_dir=folder, config_hash=digest)
            exit_code = 1
            try:
                run(job, tracker, processes)
                exit_code = 0
            finally:
                tracker.finish(exit_code)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
