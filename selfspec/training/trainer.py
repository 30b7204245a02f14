"""The training loop: clipping, held-out checks, early stop, and a resume that continues as if never stopped.

Everything a step depends on is the step number, the weights and the optimizers' moments (batches are a function of the
step, nothing is drawn while training), so a checkpoint is those three, in one file written atomically. A run killed at
any moment, also while saving, goes on from its last checkpoint and ends with the same weights as one never killed.

What is kept are the weights of the best held-out check, by expected τ and not by loss.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selfspec.errors import UserError
from selfspec.training.batches import Batch, Batches
from selfspec.training.checkpoints import read_best, read_state, remove_partials, write_best, write_state
from selfspec.training.data import write_atomically
from selfspec.training.losses import HeadLoss, head_loss_named
from selfspec.training.optimizers import check_optimizer, learning_rate, optimizers_for
from selfspec.training.processes import Processes
from selfspec.training.trainee import Scheduled, Trainee

LOG = "log.jsonl"
ALONE = Processes()


@dataclass
class TrainConfig:
    """How to train; the defaults suit the independent draft on 2 CPU cores."""

    steps: int = 2000
    batch_rows: int = 8
    row_tokens: int = 512
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    final_lr_share: float = 0.02
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 1.0
    loss: str = "ce"  # one of selfspec.training.losses.LOSSES
    optimizer: str = "adamw"  # or muon, for the matrices inside the network
    accumulate: int = 1  # batches a step, shared by the processes there are
    autocast: bool | None = None  # bfloat16 products, weights and moments in float32; None: where that is faster
    num_kept: int = 32  # target tokens kept per position
    seed: int = 0
    log_every: int = 10
    validate_every: int = 200
    checkpoint_every: int = 100
    validate_tokens: int = 8192  # held-out answer tokens used while training; the last check uses all
    begin_with: str | None = None  # a trained draft of the same make or larger, whose weights this run begins with
    patience: int = 0  # stop after so many checks in a row without a better expected τ; 0: never

    def __post_init__(self) -> None:
        counts = ("steps", "batch_rows", "row_tokens", "accumulate", "num_kept", "validate_tokens")
        for name in (*counts, "log_every", "validate_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise UserError(f"train.{name}={getattr(self, name)} must be at least 1.")
        if self.patience < 0:
            raise UserError(f"train.patience={self.patience} must be at least 1, or 0 to train all steps.")
        if self.learning_rate <= 0 or self.clip_norm <= 0:
            raise UserError("train.learning_rate and train.clip_norm must be above 0.")
        head_loss_named(self.loss)
        check_optimizer(self.optimizer)
        if not 0 <= self.warmup_steps < self.steps:
            raise UserError(f"train.warmup_steps={self.warmup_steps} must lie in [0, train.steps={self.steps}).")


def train(
    trainee: Trainee,
    train_batches: Batches,
    validate: Callable[[bool], dict[str, Any]],
    config: TrainConfig,
    folder: Path,
    run_key: str,
    report: Callable[[dict[str, Any]], None] = lambda record: None,
    processes: Processes = ALONE,
) -> dict[str, Any]:
    """Train to `config.steps`, or until the checks get no better; leaves the best weights in the trainee, and LOG and
    the checkpoints in `folder`. Returns the best weights' check on all held-out text (not the first process: {}).

    `run_key` names what is being trained (target, data, draft, settings): a checkpoint with another key is a UserError.
    `validate(everything)` gives the held-out summary.
    """
    shares = processes.shares(config.accumulate)
    named = {name: p for name, p in trainee.module.named_parameters() if p.requires_grad}
    device = next(iter(named.values())).device
    optimizers = optimizers_for(trainee.module, config)
    objective = head_loss_named(config.loss)
    parameters, autocast = list(named.values()), bool(config.autocast)
    processes.begin_alike(parameters)
    with processes.first_alone():
        if processes.first:
            folder.mkdir(parents=True, exist_ok=True)
            remove_partials(folder)
        at = read_state(folder, named, optimizers, run_key)
    log = _Log(folder / LOG, at.step, report) if processes.first else None
    if log and at.step == 0:
        log.write(step=0, **_held_out(validate(False)))
    trained_tokens, begun = 0, time.perf_counter()
    while at.step < config.steps and not at.stopped:
        batches = [train_batches.at(at.step * config.accumulate + share) for share in shares]
        if isinstance(trainee, Scheduled):
            trainee.at_step(at.step, config.steps)
        loss, num_supervised = _gradients(trainee, batches, objective, parameters, autocast, processes)
        norm = torch.nn.utils.clip_grad_norm_(parameters, config.clip_norm)
        if not bool(torch.isfinite(loss)) or not bool(torch.isfinite(norm)):
            raise UserError(
                f"Training diverged at step {at.step}: loss {float(loss)}, gradient norm {float(norm)}. The last "
                f"checkpoint in {folder} is intact; lower train.learning_rate or raise train.warmup_steps."
            )
        rate = learning_rate(config, at.step)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        at.step += 1
        trained_tokens += num_supervised
        last = at.step == config.steps
        if log and (at.step % config.log_every == 0 or last):
            speed = trained_tokens / (time.perf_counter() - begun)
            epoch = train_batches.epoch(at.step * config.accumulate - 1)
            log.write(step=at.step, epoch=epoch, loss=float(loss), lr=rate, answer_tokens_per_s=speed)
        if at.step % config.validate_every == 0 or last:
            if log:
                summary = validate(False)
                log.write(step=at.step, **_held_out(summary))
                if at.judge(summary["expected_tau"]):
                    write_best(folder, named, at.step)
                at.stopped = 0 < config.patience <= at.checks_since_best
            at.stopped = processes.decided_by_first(at.stopped, device)
        if log and (at.step % config.checkpoint_every == 0 or last or at.stopped):
            write_state(folder, named, optimizers, at, run_key)
    if not log:
        return {}
    read_best(folder, named)
    summary = validate(True)
    log.write(step=at.step, kept_step=at.best_step, **_held_out(summary))
    return {**summary, "kept_step": at.best_step, "stopped_early": at.stopped}


def _gradients(
    trainee: Trainee,
    batches: Sequence[Batch],
    objective: HeadLoss,
    parameters: Sequence[Tensor],
    autocast: bool,
    processes: Processes,
) -> tuple[Tensor, int]:
    """Leave the gradient of the step's mean loss in `parameters`; that loss, and over how many positions it is."""
    device = parameters[0].device
    num_supervised = processes.sum_number(sum(int(batch.weight_N.sum()) for batch in batches), device)
    loss = torch.zeros((), device=device)
    for batch in batches:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            part = trainee.loss(batch, objective) / num_supervised
        part.backward()
        loss += part.detach()
    return processes.sum_gradients(parameters, loss), num_supervised


def _held_out(summary: dict[str, Any]) -> dict[str, Any]:
    return {f"held_out_{name}": value for name, value in summary.items()}


class _Log:
    """JSON lines in a file; lines beyond the checkpoint a run resumes from are dropped, they will be written again."""

    def __init__(self, path: Path, step: int, report: Callable[[dict[str, Any]], None]) -> None:
        self.path, self.report = path, report
        lines = path.read_text().splitlines() if path.exists() else []
        kept = []
        for line in lines:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:  # torn by a kill
                continue
            if record["step"] <= step and step > 0 and "kept_step" not in record:
                kept.append(line)
        write_atomically(path, lambda partial: partial.write_text("".join(f"{line}\n" for line in kept)))

    def write(self, **record: Any) -> None:
        rounded = {k: round(v, 6) if isinstance(v, float) else v for k, v in record.items()}
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(rounded) + "\n")
        except OSError as error:
            raise UserError(f"Cannot write {self.path}: {error.strerror}. The last checkpoint is intact.") from error
        self.report(rounded)
