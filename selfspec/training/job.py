"""One training job from folder to folder: data and target in, a draft with its card and log out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.training.batches import Batches
from selfspec.training.card import write_card
from selfspec.training.data import Sample, load_dataset
from selfspec.training.features import features_for
from selfspec.training.identity import target_identity
from selfspec.training.self_prompts import chat_template
from selfspec.training.teacher import teachers_for
from selfspec.training.trainee import build_trainee
from selfspec.training.trainer import STATE, TrainConfig, train


def train_draft(
    target: Target,
    kind: str,
    draft_options: dict[str, Any],
    config: TrainConfig,
    data: str | Path,
    out: str | Path,
    command: str = "",
    report: Callable[[dict[str, Any]], None] = lambda record: None,
) -> dict[str, Any]:
    """Train a draft of `kind` for `target` and write it to `out`; returns the held-out summary.

    Raises UserError: no usable data, data of another target or template, unknown options, another run in `out`.
    """
    folder = Path(out).expanduser()
    trainee = build_trainee(kind, target, draft_options)  # first: it is where most mistakes show
    trainee.module.to(target.device)
    dataset = load_dataset(data)
    template = chat_template(target.tokenizer)
    identity = target_identity(target, template.before + template.after)
    teachers = teachers_for(
        target, data, dataset, identity, num_kept=config.num_kept, progress=lambda text: report({"doing": text})
    )
    features = None
    if trainee.feature_layers:
        features = features_for(
            target, data, dataset, identity, trainee.feature_layers, progress=lambda text: report({"doing": text})
        )

    def batches_of(samples: list[Sample]) -> Batches:
        return Batches(
            samples,
            [teachers[sample.index] for sample in samples],
            batch_rows=config.batch_rows,
            row_tokens=config.row_tokens,
            seed=config.seed,
            device=target.device,
            features=None if features is None else [features[sample.index] for sample in samples],
        )

    train_batches = batches_of(dataset.train)
    all_held_out = batches_of(dataset.held_out)
    some_held_out = batches_of(_first(dataset.held_out, config.validate_tokens))

    def validate(everything: bool) -> dict[str, Any]:
        batches = all_held_out if everything else some_held_out
        greedy = {i for i, sample in enumerate(batches.samples) if sample.temperature == 0}
        with torch.autocast(target.device.type, torch.bfloat16, enabled=config.autocast):
            return trainee.validate(batches.once(), greedy).summary()

    what = {
        "kind": kind,
        "draft": draft_options,
        "train": asdict(config),
        "target": identity,
        "data_manifest_sha256": dataset.manifest_sha256,
    }
    run_key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
    summary = train(trainee, train_batches, validate, config, folder, run_key, report)
    trainee.save(folder)
    write_card(folder, trainee.module, what, dataset.manifest, summary, command)
    (folder / STATE).unlink(missing_ok=True)
    return summary


def _first(samples: list[Sample], answer_tokens: int) -> list[Sample]:
    """The first samples that together hold about `answer_tokens`; at least one."""
    chosen, total = [], 0
    for sample in samples:
        if total >= answer_tokens:
            break
        chosen.append(sample)
        total += sample.answer_len
    if not chosen:
        raise UserError("train.validate_tokens must be at least 1.")
    return chosen
