"""Training Medusa's heads (Cai et al. 2024, Medusa-1: the target stays as it is). See `selfspec.training.heads`.

Residual blocks begin at zero, so every head begins as the target's own next-token prediction, one or more tokens off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from selfspec.drafters.medusa import MedusaHeads
from selfspec.target import Target
from selfspec.training.batches import Batch
from selfspec.training.heads import HeadsTrainee, read_options
from selfspec.training.rounds import Starts


def build_medusa(target: Target, options: dict[str, Any]) -> HeadsTrainee:
    typed, token_ids = read_options("medusa", target, options)
    num_outputs = target.vocab_size if token_ids is None else len(token_ids)
    heads = MedusaHeads(target.width, typed.num_heads, typed.num_blocks, num_outputs if typed.own_head else 0)
    with torch.no_grad():
        for parameter in heads.blocks.parameters():
            parameter.zero_()

    def states(hidden_NM: Tensor, batch: Batch, starts: Starts) -> Tensor:
        return heads.states(hidden_NM)

    return HeadsTrainee("medusa", target, typed, token_ids, heads, states)
