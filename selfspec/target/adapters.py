"""A LoRA adapter (Hu et al. 2021) merged into a model's weights: W + (α/r)·B·A, a target of its own.

Adapters are folders as `peft` writes them, `adapter_config.json` and `adapter_model.safetensors`; nothing is unpickled
and `peft` is not needed. The sum is formed in float64 from the weights as loaded and rounded once, so every machine,
and every dtype the target is then used in, gets the same weights and with them the same fingerprint. Everything that is
lossless is so with respect to the merged model: it is another target than its base.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from selfspec.config import conf_dir
from selfspec.errors import UserError
from selfspec.target.identity import fingerprint

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DRAFT_CONFIG = "config.json"  # written beside it by our own training: which base it belongs to
PREFIX = "base_model.model."
# what would need more than W + (α/r)·B·A: each has to be off
UNSUPPORTED = (
    *(
        "alpha_pattern",
        "bias",
        "fan_in_fan_out",
        "layer_replication",
        "lora_bias",
        "modules_to_save",
        "target_parameters",
    ),
    *("trainable_token_indices", "use_bdlora", "use_dora", "use_qalora", "alora_invocation_tokens"),
)


@dataclass(frozen=True)
class Adapter:
    """What the folder holds, checked by itself: module path -> (A `[r, in]`, B `[out, r]`)."""

    folder: Path
    factors: dict[str, tuple[Tensor, Tensor]]
    alpha: float
    rank_stabilised: bool
    base_fingerprint: str | None
    base_name: str | None

    def scale(self, rank: int) -> float:
        return self.alpha / (rank**0.5 if self.rank_stabilised else rank)


def adapter_folder(given: str | Path) -> Path:
    """An existing folder: as given, or relative to the clone that conf/ lies in. UserError if there is none."""
    path = Path(given).expanduser()
    for candidate in (path, conf_dir().parent / path):
        if candidate.is_dir():
            return candidate
    raise UserError(f"No adapter folder {given}. Needed: a folder with {CONFIG} and {WEIGHTS}, as peft writes them.")


def adapter_digest(folder: Path) -> str:
    """What names an adapter: the hash of its weights."""
    with (folder / WEIGHTS).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def merge_adapter(model: Any, given: str | Path) -> None:
    """Merge the adapter into a transformers model, in place; `model.config.adapter_sha256` then names it.

    Raises UserError, with the model as it was: no adapter there, one of another kind, made for another base.
    """
    adapter = read_adapter(adapter_folder(given))
    modules = _check_fits(model, adapter)
    with torch.no_grad():
        for name, (a_RI, b_OR) in adapter.factors.items():
            weight = modules[name].weight
            delta = adapter.scale(len(a_RI)) * (b_OR.double() @ a_RI.double())
            weight.copy_(weight.double() + delta.to(weight.device))
    model.config.adapter_sha256 = adapter_digest(adapter.folder)


def read_adapter(folder: Path) -> Adapter:
    """UserError: files missing, damaged or pickled, a kind that is not plain LoRA, factors that are not pairs."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            pickled = " Pickled weights (.bin) are not read: save them anew with a current peft." * (
                name == WEIGHTS and any(folder.glob("*.bin"))
            )
            raise UserError(f"{folder} is not an adapter: it has no {name}.{pickled}")
    try:
        config = json.loads((folder / CONFIG).read_text())
        tensors = load_file(folder / WEIGHTS)
    except (json.JSONDecodeError, UnicodeDecodeError, OSError, SafetensorError) as error:
        raise UserError(f"The adapter in {folder} cannot be read ({error}). Copy or train it anew.") from error
    wanted = {name: config.get(name) for name in UNSUPPORTED if config.get(name) not in (None, False, "none", {}, [])}
    if config.get("peft_type") != "LORA" or wanted:
        what = ", ".join(f"{name}={value}" for name, value in wanted.items()) or f"peft_type={config.get('peft_type')}"
        raise UserError(
            f"The adapter in {folder} is not plain LoRA ({what}). Merge it with peft (merge_and_unload), save the "
            "whole model, and load that folder as the target."
        )
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    for key in sorted(tensors):
        name = key.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        if not key.startswith(PREFIX) or not key.endswith((".lora_A.weight", ".lora_B.weight")):
            raise UserError(
                f"{folder / WEIGHTS} holds {key!r}, which is no LoRA factor ({PREFIX}<module>.lora_A.weight)."
            )
        if key.endswith(".lora_A.weight"):
            partner = tensors.get(f"{PREFIX}{name}.lora_B.weight")
            if partner is None or partner.shape[1] != tensors[key].shape[0]:
                raise UserError(f"{folder / WEIGHTS}: {key!r} has no lora_B of the same rank. The file is incomplete.")
            factors[name] = (tensors[key], partner)
    if len(tensors) != 2 * len(factors) or not factors:
        raise UserError(
            f"{folder / WEIGHTS} holds {len(factors)} pairs of factors in {len(tensors)} tensors: incomplete."
        )
    base = _draft_config(folder).get("base") or {}
    return Adapter(
        folder=folder,
        factors=factors,
        alpha=float(config["lora_alpha"]),
        rank_stabilised=bool(config.get("use_rslora")),
        base_fingerprint=base.get("fingerprint"),
        base_name=base.get("name") or config.get("base_model_name_or_path"),
    )


def _draft_config(folder: Path) -> dict[str, Any]:
    path = folder / DRAFT_CONFIG
    found = json.loads(path.read_text()) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def _check_fits(model: Any, adapter: Adapter) -> dict[str, Any]:
    """The adapted linear layers by name. UserError when this is not the model the adapter was made for."""
    made_for = f"It was made for {adapter.base_name or 'another model'}; give that one as the base."
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    for name, (a_RI, b_OR) in adapter.factors.items():
        there = linears.get(name)
        if there is None or (there is head and head.weight is embedding.weight):
            why = "is tied to the embedding" if there is not None else "is not among its linear layers"
            raise UserError(f"The adapter {adapter.folder} adapts {name}, which {why} in this model. {made_for}")
        if tuple(there.weight.shape) != (len(b_OR), a_RI.shape[1]):
            raise UserError(
                f"The adapter {adapter.folder} adapts {name} as {len(b_OR)}x{a_RI.shape[1]}, but here it is "
                f"{there.weight.shape[0]}x{there.weight.shape[1]}. {made_for}"
            )
    if adapter.base_fingerprint is not None:
        config = model.config
        found = fingerprint(model, head.weight.shape[0], config.num_hidden_layers, config.hidden_size)
        if found != adapter.base_fingerprint:
            raise UserError(
                f"The adapter {adapter.folder} belongs to weights with fingerprint {adapter.base_fingerprint}; these "
                f"have {found}. {made_for}"
            )
    return linears
