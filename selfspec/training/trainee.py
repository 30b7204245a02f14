"""What the trainer needs of a draft: one protocol, one file per draft, one line in TRAINEES."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from selfspec.config import allowed
from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.training.batches import Batch
from selfspec.training.evaluate import Validation
from selfspec.training.losses import HeadLoss, head_loss


class Trainee(Protocol):
    module: nn.Module  # what is trained and checkpointed: its parameters and nothing of the target's
    feature_layers: tuple[int, ...]  # target hidden states wanted in `Batch.features_BTF`: those entering these layers

    def loss(self, batch: Batch, objective: HeadLoss = head_loss) -> Tensor:
        """Sum of `objective` over the supervised positions; the trainer divides by their number in the whole step."""

    def validate(self, batches: Iterable[Batch], greedy: set[int]) -> Validation:
        """Held-out quality; `greedy` are the documents that the target wrote at temperature 0."""

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors of the draft."""


@runtime_checkable
class Scheduled(Protocol):
    """A trainee whose loss follows a schedule: told before each step which one it is, of how many."""

    def at_step(self, step: int, steps: int) -> None: ...


@runtime_checkable
class Positioned(Protocol):
    """A trainee with a head or an unrolled step for each draft position, each with labels of its own."""

    num_positions: int


@runtime_checkable
class Described(Protocol):
    """A trainee with more to say on its card than the usual measures."""

    def describe(self, summary: dict[str, Any]) -> list[str]:
        """Lines of markdown."""


def trainees() -> dict[str, Callable[[Target, dict[str, Any]], Trainee]]:
    from selfspec.training.eagle3 import build_eagle3
    from selfspec.training.exit_adapter import build_exit_adapter
    from selfspec.training.hydra import build_hydra
    from selfspec.training.independent import build_independent
    from selfspec.training.layerskip import build_layerskip
    from selfspec.training.medusa import build_medusa
    from selfspec.training.mtp import build_mtp

    return {
        "independent": build_independent,
        "exit_adapter": build_exit_adapter,
        "eagle3": build_eagle3,
        "layerskip": build_layerskip,
        "medusa": build_medusa,
        "hydra": build_hydra,
        "mtp": build_mtp,
    }


def check_options(kind: str, given: Iterable[str], names: Iterable[str]) -> None:
    """UserError for an option that a draft of this kind does not have."""
    known = list(names)
    if unknown := sorted(set(given) - set(known)):
        raise UserError(f"draft.{unknown[0]} is no option of {kind}. {allowed(unknown[0], known)}")


def build_trainee(kind: str, target: Target, options: dict[str, Any]) -> Trainee:
    """The draft to train, by drafter kind. UserError names the kinds that can be trained, or the unknown option."""
    table = trainees()
    if kind not in table:
        raise UserError(f"drafter {kind!r} cannot be trained. {allowed(kind, table)}")
    return table[kind](target, options)
