"""Training text made by the target itself: python experiments/make_data.py out=data/smollm2"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig

from selfspec.config import conf_dir
from selfspec.errors import UserError
from selfspec.target import Target, load_target
from selfspec.training.config import MakeDataConfig, resolve_job, settled_dtype
from selfspec.training.data import load_dataset
from selfspec.training.draft_vocab import count_draft_vocab
from selfspec.training.features import observe_data
from selfspec.training.generation import Spent
from selfspec.training.identity import target_identity
from selfspec.training.making import make_data
from selfspec.training.self_prompts import template_of
from selfspec.training.trainer import TrainConfig


def report(answer_tokens: int, tokens_per_s: float, spent: Spent) -> None:
    rate = f"{tokens_per_s:6.0f} tokens/s ({spent.summary()})"
    print(f"{time.strftime('%H:%M:%S')}  {answer_tokens:>9,} answer tokens  {rate}", flush=True)


def observe(target: Target, folder: str, layers: list[int]) -> None:
    """Hidden states and distributions in one pass, for all drafts that will be trained on this text."""
    template = template_of(target.tokenizer)
    identity = target_identity(target, template.before + template.after)
    num_kept = TrainConfig().num_kept
    observe_data(target, load_dataset(folder), identity, layers, num_kept=num_kept)


@hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="make_data")
def main(composed: DictConfig) -> None:
    try:
        job = resolve_job(MakeDataConfig, composed)
        if job.runtime.num_threads:
            torch.set_num_threads(job.runtime.num_threads)
        target = load_target(job.target, dtype=settled_dtype(job.runtime), device=job.runtime.device)
        prompts = job.prompts(target.tokenizer)
        manifest = make_data(target, job.data, job.out, prompts, report)
        if job.observe_layers:
            observe(target, job.out, job.observe_layers)
        covered = {}
        if job.draft_vocab:
            covered = count_draft_vocab(target, [job.out, *job.draft_vocab_data], Path(job.draft_vocab))
    except UserError as error:
        sys.exit(f"error: {error}")
    print(f"{job.out}: {manifest['totals']}")
    for size, share in covered.items():
        print(f"{job.draft_vocab}: the first {size:,} tokens cover {share:.2%} of held-out text")


if __name__ == "__main__":
    main()
