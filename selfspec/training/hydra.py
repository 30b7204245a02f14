"""Training Hydra's heads (Ankner et al. 2024). See `selfspec.training.heads`.

The first block begins as [h; embeddings] -> h and the others at zero, so every head begins as the target's own
next-token prediction, one or more tokens off, and learns what the drafted tokens change. A prefix layer begins as a
copy of the target's last one that adds nothing yet, its norm as the target's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from selfspec.drafters.heads import linears
from selfspec.drafters.hydra import HydraHeads
from selfspec.target import Target
from selfspec.training.batches import Batch
from selfspec.training.heads import HeadsTrainee, read_options
from selfspec.training.packed import LayerRunner
from selfspec.training.rounds import Starts


def build_hydra(target: Target, options: dict[str, Any]) -> HeadsTrainee:
    typed, token_ids = read_options("hydra", target, options)
    num_outputs = target.vocab_size if token_ids is None else len(token_ids)
    own = num_outputs if typed.own_head else 0
    runner = LayerRunner(target) if typed.prefix else None
    last, parts = target.num_layers - 1, None
    if runner is not None:
        parts = nn.ModuleDict({"layer": runner.copy_layer(last), "norm": runner.copy_norm()})
    heads = HydraHeads(target.width, typed.num_heads, typed.num_blocks, own, prefix=parts)
    with torch.no_grad():
        for name, parameter in heads.named_parameters():
            if name.startswith("prefix.layer.") and name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
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
                token_NM = target.embed(text[(starts.at_N + 1 + head).clamp(max=len(text) - 1)])
            read_NX = torch.cat([read_NX, token_NM.to(read_NX.dtype)], -1)
            found.append(heads.state(head, read_NX))
        return torch.stack(found)

    def prefix(batch: Batch) -> Tensor:
        assert runner is not None and parts is not None and batch.features_BTF is not None
        hidden_BTM = runner.run(parts["layer"], batch.features_BTF.float(), batch, runner.windows[last])
        normed_BTM: Tensor = parts["norm"](hidden_BTM)
        return normed_BTM

    return HeadsTrainee("hydra", target, typed, token_ids, heads, states, prefix if typed.prefix else None)
