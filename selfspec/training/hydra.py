"""Training Hydra's heads (Ankner et al. 2024). See `selfspec.training.heads`.

The first block begins as [h; embeddings] -> h and the others at zero, so every head begins as the target's own
next-token prediction, one or more tokens off, and learns what the drafted tokens change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from selfspec.drafters.heads import linears
from selfspec.drafters.hydra import HydraHeads
from selfspec.target import Target
from selfspec.training.batches import Batch
from selfspec.training.heads import HeadsTrainee, Starts, read_options


def build_hydra(target: Target, options: dict[str, Any]) -> HeadsTrainee:
    typed, token_ids = read_options("hydra", target, options)
    num_outputs = target.vocab_size if token_ids is None else len(token_ids)
    heads = HydraHeads(target.width, typed.num_heads, typed.num_blocks, num_outputs if typed.own_head else 0)
    with torch.no_grad():
        for parameter in [*heads.blocks.parameters(), *heads.residual.parameters()]:
            parameter.zero_()
        for residual in linears(heads.residual):
            residual.weight[:, : target.width].fill_diagonal_(1.0)

    def states(hidden_NM: Tensor, batch: Batch, starts: Starts) -> Tensor:
        """The text's own tokens behind p stand for those that were drafted."""
        text = batch.token_ids_BT.flatten()
        read_NX, found = hidden_NM, []
        for head in range(typed.num_heads):
            with torch.no_grad():
                token_N = text[(starts.at_N + 1 + head).clamp(max=len(text) - 1)]
                read_NX = torch.cat([read_NX, target.embed(token_N).to(read_NX.dtype)], -1)
            found.append(heads.state(head, read_NX))
        return torch.stack(found)

    return HeadsTrainee("hydra", target, typed, token_ids, heads, states)
