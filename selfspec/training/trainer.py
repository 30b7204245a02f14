"""The training loop: warm-up and cosine, clipping, held-out checks, and a resume that continues as if never stopped.

Everything a step depends on is the step number, the weights and the optimizer's moments (batches are a function of the
step, nothing is drawn while training), so a checkpoint is those three, in one file written atomically. A run killed at
any moment, also while saving, goes on from its last checkpoint and ends with the same weights as one never killed.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from selfspec.errors import UserError
from selfspec.training.batches import Batches
from selfspec.training.data import write_atomically
from selfspec.training.losses import head_loss_named
from selfspec.training.trainee import Trainee

STATE = "training_state.safetensors"
LOG = "log.jsonl"


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
    accumulate: int = 1
    autocast: bool = True  # bfloat16 products; weights and moments stay float32
    num_kept: int = 32  # target tokens kept per position
    seed: int = 0
    log_every: int = 10
    validate_every: int = 200
    checkpoint_every: int = 100
    validate_tokens: int = 8192  # held-out answer tokens used while training; the last check uses all

    def __post_init__(self) -> None:
        for name in ("steps", "batch_rows", "row_tokens", "accumulate", "num_kept", "log_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise UserError(f"train.{name}={getattr(self, name)} must be at least 1.")
        if self.learning_rate <= 0 or self.clip_norm <= 0:
            raise UserError("train.learning_rate and train.clip_norm must be above 0.")
        head_loss_named(self.loss)
        if not 0 <= self.warmup_steps < self.steps:
            raise UserError(f"train.warmup_steps={self.warmup_steps} must lie in [0, train.steps={self.steps}).")


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then a half cosine down to `final_lr_share`."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    low = config.final_lr_share
    return config.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))


def train(
    trainee: Trainee,
    train_batches: Batches,
    validate: Callable[[bool], dict[str, Any]],
    config: TrainConfig,
    folder: Path,
    run_key: str,
    report: Callable[[dict[str, Any]], None] = lambda record: None,
) -> dict[str, Any]:
    """Train to `config.steps`; returns the last validation (on all held-out text) and leaves LOG and STATE in `folder`.

    `run_key` names what is being trained (target, data, draft, settings): a checkpoint with another key is a UserError.
    `validate(everything)` gives the held-out summary.
    """
    folder.mkdir(parents=True, exist_ok=True)
    named = dict(trainee.module.named_parameters())
    decayed = [p for p in named.values() if p.dim() > 1]
    others = [p for p in named.values() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=config.learning_rate,
        betas=config.betas,
        fused=True,
    )
    objective = head_loss_named(config.loss)
    step = restore(folder, named, optimizer, run_key)
    log = _Log(folder / LOG, step, report)
    device = next(iter(named.values())).device
    final: dict[str, Any] = {}
    trained_tokens, begun = 0, time.perf_counter()
    while step < config.steps:
        rate = learning_rate(config, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = torch.zeros((), device=device)
        batches = [train_batches.at(step * config.accumulate + micro) for micro in range(config.accumulate)]
        num_supervised = sum(int(batch.weight_N.sum()) for batch in batches)
        for batch in batches:
            with torch.autocast(device.type, torch.bfloat16, enabled=config.autocast):
                part = trainee.loss(batch, objective) / num_supervised
            part.backward()
            loss += part.detach()
        trained_tokens += num_supervised
        norm = torch.nn.utils.clip_grad_norm_(list(named.values()), config.clip_norm)
        if not bool(torch.isfinite(loss)) or not bool(torch.isfinite(norm)):
            raise UserError(
                f"Training diverged at step {step}: loss {float(loss)}, gradient norm {float(norm)}. The last "
                f"checkpoint in {folder} is intact; lower train.learning_rate or raise train.warmup_steps."
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % config.log_every == 0 or step == config.steps:
            elapsed_s = time.perf_counter() - begun
            epoch = train_batches.epoch(step * config.accumulate - 1)
            log.write(step=step, epoch=epoch, loss=float(loss), lr=rate, answer_tokens_per_s=trained_tokens / elapsed_s)
        last = step == config.steps
        if step % config.validate_every == 0 or last:
            final = validate(last)
            log.write(step=step, **{f"held_out_{name}": value for name, value in final.items()})
        if step % config.checkpoint_every == 0 or last:
            checkpoint(folder, named, optimizer, step, run_key)
    return final or validate(True)


def checkpoint(
    folder: Path, named: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, step: int, run_key: str
) -> None:
    tensors: dict[str, Tensor] = {}
    for name, parameter in named.items():
        tensors[f"weight/{name}"] = parameter.detach()
        for what, value in optimizer.state[parameter].items():
            tensors[f"{what}/{name}"] = value
    metadata = {"step": str(step), "run_key": run_key}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_atomically(folder / STATE, lambda partial: save_file(tensors, partial, metadata=metadata))


def restore(folder: Path, named: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, run_key: str) -> int:
    """The step to go on at: 0 with nothing there. UserError when the checkpoint is of another run."""
    for partial in folder.glob(f".{STATE}.*.partial"):  # a save that was killed
        partial.unlink()
    path = folder / STATE
    if not path.exists():
        return 0
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        if metadata["run_key"] != run_key:
            raise UserError(
                f"{folder} holds a checkpoint of another training run (other target, data, draft or settings). "
                "Give another out=<folder>, or remove that one to begin anew."
            )
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(file.get_tensor(f"weight/{name}"))
                state = {what: file.get_tensor(f"{what}/{name}") for what in ("step", "exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {
                    what: value if what == "step" else value.to(parameter.device) for what, value in state.items()
                }
    return int(metadata["step"])


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
            if record["step"] <= step:
                kept.append(line)
        write_atomically(path, lambda partial: partial.write_text("".join(f"{line}\n" for line in kept)))

    def write(self, **record: Any) -> None:
        rounded = {k: round(v, 6) if isinstance(v, float) else v for k, v in record.items()}
        with self.path.open("a") as file:
            file.write(json.dumps(rounded) + "\n")
        self.report(rounded)
