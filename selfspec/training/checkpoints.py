"""What a training run leaves on its way: where it is (STATE), and the best weights so far (BEST), each in one file.

Both are written whole or not at all. STATE is all that a step depends on: its number, the weights, the optimizers'
moments, and how the held-out checks have gone. BEST may be of a later step than STATE when a run was killed; the run
that goes on comes by that step again, with the same weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

from selfspec.errors import UserError
from selfspec.training.data import write_atomically

STATE = "training_state.safetensors"
BEST = "best_weights.safetensors"
WEIGHT = "weight"


@dataclass
class Standing:
    """How far a run is, and how good it was at its best: the held-out expected τ, and the checks since then."""

    step: int = 0
    best_tau: float = 0.0
    best_step: int = 0
    checks_since_best: int = 0
    stopped: bool = False  # before its last step, for want of a better check

    def judge(self, tau: float) -> bool:
        """Take note of a held-out check; whether it was the best so far."""
        if tau > self.best_tau:
            self.best_tau, self.best_step, self.checks_since_best = tau, self.step, 0
            return True
        self.checks_since_best += 1
        return False


def write_state(
    folder: Path, named: Mapping[str, Tensor], optimizers: Sequence[Optimizer], standing: Standing, run_key: str
) -> None:
    tensors = _weights(named)
    for name, parameter in named.items():
        for optimizer in optimizers:
            for what, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{what}/{name}"] = value.contiguous()
    metadata = {"standing": json.dumps(asdict(standing)), "run_key": run_key}
    write_atomically(folder / STATE, lambda partial: save_file(tensors, partial, metadata=metadata))


def read_state(folder: Path, named: Mapping[str, Tensor], optimizers: Sequence[Optimizer], run_key: str) -> Standing:
    """Where to go on: step 0 with nothing there. UserError: the checkpoint is damaged, or of another run."""
    path = folder / STATE
    if not path.exists():
        return Standing()
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"The checkpoint {path} is damaged ({error}). Remove it to begin anew.") from error
    if metadata.get("run_key") != run_key:
        raise UserError(
            f"{folder} holds a checkpoint of another training run (other target, data, draft or settings). "
            "Give another out=<folder>, or remove that one to begin anew."
        )
    _load_weights(named, tensors)
    owner = {parameter: opt for opt in optimizers for group in opt.param_groups for parameter in group["params"]}
    kinds = {name.split("/", 1)[0] for name in tensors} - {WEIGHT}
    for name, parameter in named.items():
        kept = {what: tensors.get(f"{what}/{name}") for what in kinds}
        state = {what: value.to(parameter.device) for what, value in kept.items() if value is not None}
        if state:
            owner[parameter].state[parameter] = state
    return Standing(**json.loads(metadata["standing"]))


def write_best(folder: Path, named: Mapping[str, Tensor], step: int) -> None:
    write_atomically(folder / BEST, lambda partial: save_file(_weights(named), partial, metadata={"step": str(step)}))


def read_best(folder: Path, named: Mapping[str, Tensor]) -> None:
    with safe_open(folder / BEST, framework="pt") as file:
        _load_weights(named, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118


def remove_partials(folder: Path) -> None:
    """What a save left that was killed in the middle."""
    for name in (STATE, BEST):
        for partial in folder.glob(f".{name}.*.partial"):
            partial.unlink()


def _weights(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{WEIGHT}/{name}": parameter.detach().contiguous() for name, parameter in named.items()}


@torch.no_grad()
def _load_weights(named: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    for name, parameter in named.items():
        parameter.copy_(tensors[f"{WEIGHT}/{name}"])
