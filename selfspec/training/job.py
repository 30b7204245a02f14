"""One training job from folder to folder: data and target in, a draft with its card and log out."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.target.fastest import choices_made, fastest_product
from selfspec.training.batches import Batches
from selfspec.training.beginning import begin_with
from selfspec.training.card import SUMMARY, write_card
from selfspec.training.checkpoints import BEST, STATE
from selfspec.training.data import Sample, load_dataset
from selfspec.training.features import features_for, observe_data
from selfspec.training.identity import target_identity
from selfspec.training.processes import Processes
from selfspec.training.self_prompts import template_of
from selfspec.training.teacher import teachers_for
from selfspec.training.trainee import Described, Positioned, Trainee, build_trainee
from selfspec.training.trainer import ALONE, TrainConfig, train

HOW_OFTEN = ("log_every", "checkpoint_every")  # settings that a run may be continued without


def train_draft(
    target: Target,
    kind: str,
    draft_options: dict[str, Any],
    config: TrainConfig,
    data: str | Path | Sequence[str | Path],
    out: str | Path,
    command: str = "",
    report: Callable[[dict[str, Any]], None] = lambda record: None,
    processes: Processes = ALONE,
    num_shards: int | None = None,
) -> dict[str, Any]:
    """Train a draft of `kind` for `target` on one or several data folders (the first num_shards of each) and write it
    to `out`; returns the held-out summary (not the first of several processes: {}). A finished run is not repeated.

    Raises UserError: no usable data, data of another target or template, unknown options, another run in `out`.
    """
    folder = Path(out).expanduser()
    trainee = build_trainee(kind, target, draft_options)  # first: it is where most mistakes show
    trainee.module.to(target.device)
    dataset = load_dataset(data, num_shards)
    _check_positions(trainee, dataset.train)
    template = template_of(target.tokenizer)
    identity = target_identity(target, template.before + template.after)
    settings = {name: value for name, value in asdict(config).items() if name not in (*HOW_OFTEN, "begin_with")}
    if config.autocast is None:  # left open, it is no part of the run's name: that of the runs from before it could be
        settings["autocast"] = True
    what = {"kind": kind, "draft": draft_options, "target": identity, "data_manifest_sha256": dataset.manifest_sha256}
    if config.begin_with:
        what["begun_with"] = begin_with(trainee, kind, config.begin_with, target)
    run_key = hashlib.sha256(json.dumps({**what, "train": settings}, sort_keys=True).encode()).hexdigest()
    if (finished := _finished(folder, run_key)) is not None:
        report({"doing": f"nothing: {folder} holds this draft, trained to its end. Remove it to train it again"})
        return finished if processes.first else {}

    def progress(text: str) -> None:
        report({"doing": text})

    config = with_autocast(config, target.device, processes, progress)
    features = None
    with processes.first_alone():
        layers = trainee.feature_layers
        observe_data(target, dataset, identity, layers, num_kept=config.num_kept, progress=progress)
        teachers = teachers_for(target, dataset, identity, num_kept=config.num_kept, progress=progress)
        if trainee.feature_layers:
            features = features_for(target, dataset, identity, trainee.feature_layers, progress=progress)

    def batches_of(samples: list[Sample]) -> Batches:
        return Batches(
            samples,
            [teachers[sample.index] for sample in samples],
            batch_rows=config.batch_rows,
            row_tokens=config.row_tokens,
            seed=config.seed,
            device=target.device,
            features=None if features is None else features(samples),
        )

    train_batches = batches_of(dataset.train)
    all_held_out = batches_of(dataset.held_out)
    some_held_out = batches_of(_some(dataset.held_out, config.validate_tokens, config.seed))

    def summary_on(batches: Batches) -> dict[str, Any]:
        greedy = {i for i, sample in enumerate(batches.samples) if sample.temperature == 0}
        with torch.autocast(target.device.type, torch.bfloat16, enabled=bool(config.autocast)):
            return trainee.validate(batches.once(), greedy).summary()

    def validate(everything: bool) -> dict[str, Any]:
        return summary_on(all_held_out if everything else some_held_out)

    summary = train(trainee, train_batches, validate, config, folder, run_key, report, processes)
    if processes.first:
        _save(trainee, folder)
        facts = {**what, "train": asdict(config), "run_key": run_key, "processes": processes.count}
        facts["on_training_text"] = summary_on(batches_of(_some(dataset.train, config.validate_tokens, config.seed)))
        facts |= {"target_dtype": str(target.dtype).removeprefix("torch."), "dtype_choices": choices_made()}
        notes = trainee.describe(summary) if isinstance(trainee, Described) else []
        write_card(folder, trainee.module, facts, dataset, summary, command, notes)
        for name in (STATE, BEST):
            (folder / name).unlink(missing_ok=True)
    return summary


def with_autocast(
    config: TrainConfig, device: torch.device, processes: Processes, progress: Callable[[str], None]
) -> TrainConfig:
    """`autocast` settled where it was left open: one answer for all processes, by the first one's time."""
    if config.autocast is not None:
        return config
    choice = fastest_product(device)
    progress(f"products in {choice.reason}")
    return replace(config, autocast=processes.decided_by_first(choice.dtype == torch.bfloat16, device))


def _finished(folder: Path, run_key: str) -> dict[str, Any] | None:
    """The summary of the draft in `folder`, None with no finished one there. UserError when it is another one."""
    try:
        facts = json.loads((folder / SUMMARY).read_text())
    except FileNotFoundError:
        return None
    if facts.get("run_key") != run_key:
        raise UserError(
            f"{folder} holds a finished draft of another run (other target, data, draft or settings). Give another "
            "out=<folder>, or remove that one."
        )
    summary: dict[str, Any] = facts["held_out"]
    return summary


def _save(trainee: Trainee, folder: Path) -> None:
    """The draft's files, each whole or not there; the weights come last. UserError when they cannot be written."""
    aside = folder / ".draft.partial"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir()
        trainee.save(aside)
        for path in sorted(aside.iterdir(), key=lambda path: path.suffix == ".safetensors"):
            path.replace(folder / path.name)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"Cannot write the draft to {folder}: {error}. Nothing half-written was left; the training is kept, and "
            "the same command goes on from it."
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _check_positions(trainee: Trainee, samples: list[Sample]) -> None:
    """A head beyond every answer's end would never see a label, and would be saved as it was drawn."""
    longest = max(sample.answer_len for sample in samples)
    if isinstance(trainee, Positioned) and trainee.num_positions > longest:
        raise UserError(
            f"The draft has {trainee.num_positions} positions (heads, or unrolled steps), but no answer in the data is "
            f"longer than {longest} tokens: the last ones would never be trained. Give fewer, or data with longer "
            "answers."
        )


def _some(samples: list[Sample], answer_tokens: int, seed: int) -> list[Sample]:
    """Samples that together hold about `answer_tokens`, drawn from all folders alike; at least one."""
    chosen: list[Sample] = []
    total = 0
    for number in np.random.Generator(np.random.Philox(key=[seed, 0])).permutation(len(samples)):
        sample = samples[number]
        if total >= answer_tokens:
            break
        chosen.append(sample)
        total += sample.answer_len
    if not chosen:
        raise UserError("train.validate_tokens must be at least 1.")
    return chosen
