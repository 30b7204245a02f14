"""Draft with a DeepSeek-style multi-token-prediction module, chained: `selfspec.drafters.mtp_module` has the formula.

The module is one decoder layer of the target's kind over the target's last hidden state (before the final norm) and the
next token's embedding; a norm of its own, then the target's head. The rounds are those of
`selfspec.drafters.draft_layer_chain`; a draft step costs one layer, `eh_proj` and the head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.drafters.checkpoint import load_into, read_checkpoint
from selfspec.drafters.draft_layer import blank_parts, config_value, target_head, target_like
from selfspec.drafters.draft_layer_chain import ChainDrafter, ChainParts
from selfspec.drafters.mtp_module import MtpModule
from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.target.fused import RMSNorm
from selfspec.target.packed import PackedLinear


@dataclass
class Options:
    """checkpoint: a folder with a trained draft, made by experiments/train.py."""

    checkpoint: str


def parts_of(target: Target, module: MtpModule, copied_layer: int, token_ids_V: Tensor | None) -> ChainParts:
    """The module's weights, packed; in the target's dtype and on its device already."""
    layer = target_like(target, module.layer, copied_layer)
    enorm, hnorm, norm = RMSNorm(module.enorm), RMSNorm(module.hnorm), RMSNorm(module.norm)
    eh_proj, (unembed, head_bytes) = PackedLinear(module.eh_proj.weight, None), target_head(target, token_ids_V)

    def join_token(embedded_BTM: Tensor, hidden_BTM: Tensor) -> tuple[Tensor, Tensor]:
        joined_BTM = eh_proj(torch.cat([enorm(embedded_BTM), hnorm(hidden_BTM)], -1))
        return layer.norm(joined_BTM), joined_BTM

    def logits(hidden_BTM: Tensor) -> Tensor:
        return unembed(norm(hidden_BTM))

    return ChainParts(lambda features: features, join_token, layer, logits, layer.nbytes + eh_proj.nbytes + head_bytes)


def build(target: Target, options: Options) -> ChainDrafter:
    checkpoint = read_checkpoint(options.checkpoint, "mtp", target)
    feature_layer, copied = config_value(checkpoint, "feature_layer"), config_value(checkpoint, "copied_layer")
    hidden = config_value(checkpoint, "hidden")
    if feature_layer != target.num_layers or hidden != "before_final_norm" or not 0 <= copied < target.num_layers:
        raise UserError(
            f"{checkpoint.folder}/config.json: feature_layer={feature_layer}, hidden={hidden!r} and "
            f"copied_layer={copied} are not possible: allowed are {target.num_layers} (what leaves the last layer), "
            f"'before_final_norm' and 0 to {target.num_layers - 1}."
        )
    blank = blank_parts(target, "mtp")
    with torch.device("meta"):
        module = MtpModule(target.width, target.config.rms_norm_eps, blank["layer"], blank["norm"])
    load_into(module, checkpoint)
    return ChainDrafter("mtp", target, (feature_layer,), parts_of(target, module, copied, checkpoint.token_ids))
