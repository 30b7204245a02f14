"""How weights are moved: AdamW, or Muon for the matrices inside the network; and the learning rate of every step.

Muon (Jordan et al. 2024; torch.optim.Muon) orthogonalises the momentum of a matrix. It is made for hidden layers:
embeddings and output heads, and everything that is no matrix, stay with AdamW. Its step is scaled to AdamW's usual size
(Liu et al. 2025, arXiv 2502.16982), so one learning rate and one weight decay serve both.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from selfspec.config import allowed
from selfspec.errors import UserError

OPTIMIZERS = ("adamw", "muon")
HEADS = "lm_head"  # modules of this name are output heads


class Settings(Protocol):
    @property
    def steps(self) -> int: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def final_lr_share(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def betas(self) -> tuple[float, float]: ...
    @property
    def optimizer(self) -> str: ...


def check_optimizer(name: str) -> None:
    if name not in OPTIMIZERS:
        raise UserError(f"train.optimizer={name!r} is no optimizer. {allowed(name, OPTIMIZERS)}")


def optimizers_for(module: nn.Module, settings: Settings) -> list[Optimizer]:
    """One optimizer or two, together holding every parameter of `module` exactly once. Matrices alone are decayed."""
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    by_muon = _hidden_matrices(module) if settings.optimizer == "muon" else set()
    others = [parameter for name, parameter in named.items() if name not in by_muon]
    groups = [
        {"params": [p for p in others if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in others if p.dim() <= 1], "weight_decay": 0.0},
    ]
    found: list[Optimizer] = []
    if groups := [group for group in groups if group["params"]]:
        found.append(torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=True))
    if by_muon:
        found.append(
            torch.optim.Muon(
                [named[name] for name in sorted(by_muon)],
                lr=settings.learning_rate,
                weight_decay=settings.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    return found


def _hidden_matrices(module: nn.Module) -> set[str]:
    ends = {id(p) for part in module.modules() if isinstance(part, nn.Embedding) for p in part.parameters()}
    named = module.named_parameters()
    return {
        name
        for name, p in named
        if p.requires_grad and p.dim() == 2 and id(p) not in ends and HEADS not in name.split(".")
    }


def learning_rate(settings: Settings, step: int) -> float:
    """Linear warm-up, then a half cosine down to `final_lr_share`."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    low = settings.final_lr_share
    return settings.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))
