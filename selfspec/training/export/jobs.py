"""What experiments/export.py and experiments/import_draft.py are asked to do, typed, and the table of what they can."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from omegaconf import MISSING
from torch import Tensor

from selfspec.config import TargetConfig, allowed
from selfspec.drafters.registry import load_drafter
from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.training.export.eagle3_in import import_eagle3, is_eagle3
from selfspec.training.export.eagle3_out import export_midlayer, export_speculators
from selfspec.training.export.folders import new_folder, read_folder, write_into
from selfspec.training.export.heads_in import import_hydra, import_medusa, is_hydra, is_medusa
from selfspec.training.export.layerskip_out import export_transformers
from selfspec.training.identity import target_identity

EAGLE3_FORMATS = {"speculators": export_speculators, "midlayer": export_midlayer}


@dataclass
class ExportConfig:
    """experiments/export.py."""

    target: TargetConfig = field(default_factory=TargetConfig)
    draft: str = MISSING
    format: str = MISSING
    verifier: str | None = None
    out: str = MISSING


@dataclass
class ImportConfig:
    """experiments/import_draft.py."""

    target: TargetConfig = field(default_factory=TargetConfig)
    draft: str = MISSING
    feature_layers: list[int] | None = None
    out: str = MISSING


def export_draft(target: Target, draft: str, format: str, out: str, verifier: str | None = None) -> None:
    """`draft`, one of ours, in another project's format. UserError: what the exporter refuses, or an unknown format."""
    if format == "transformers":
        if verifier is not None:
            raise UserError("format=transformers makes a whole model, which drafts for itself: leave verifier out.")
        export_transformers(draft, target, out)
        return
    if format not in EAGLE3_FORMATS:
        raise UserError(f"format={format!r} is unknown. {allowed(format, ['transformers', *EAGLE3_FORMATS])}")
    if verifier is None:
        raise UserError(f"format={format} names the model it drafts for: give verifier=owner/name, its hub id.")
    EAGLE3_FORMATS[format](draft, target, verifier, out)


def import_draft(target: Target, draft: str, out: str, feature_layers: list[int] | None = None) -> dict[str, Any]:
    """Another project's draft as one of ours for `target`, loaded once before it appears in `out`; its config.json.

    UserError: an unknown layout, and whatever the importer or the drafter refuses.
    """
    source = read_folder(draft)
    if is_eagle3(source):
        config, tensors = import_eagle3(source, target, feature_layers)
    elif is_medusa(source) or is_hydra(source):
        if feature_layers is not None:
            raise UserError("feature_layers is for EAGLE-3: Medusa's and Hydra's heads read the last hidden state.")
        config, tensors = (import_medusa if is_medusa(source) else import_hydra)(source, target)
    else:
        raise UserError(
            f"{source.path} is none of the layouts that are read: EAGLE-3 (speculators or flat), Medusa, Hydra. "
            f"Its config.json says: {', '.join(sorted(source.config)[:12])}."
        )
    config["target"] = {name: value for name, value in target_identity(target).items() if name != "template"}
    config["imported_from"] = source.path.name
    tensors, rounded = in_bfloat16(tensors)
    note = f"{rounded} of its {len(tensors)} tensors were rounded to bfloat16." if rounded else "Its weights are kept."
    readme = f"# {config['kind']} draft for {target.name}, read from `{source.path.name}`\n\n{note}\n"
    with new_folder(out) as folder:
        write_into(folder, config, tensors, readme)
        load_drafter(folder, target)
    return config


def in_bfloat16(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """Floating tensors as our drafts keep them, and how many of them lost digits on the way."""
    kept = {
        name: weight.to(torch.bfloat16) if weight.is_floating_point() else weight for name, weight in tensors.items()
    }
    return kept, sum(not torch.equal(kept[name].to(weight.dtype), weight) for name, weight in tensors.items())
