"""A decoder layer and the final norm of a target's kind without weights, to be filled from a draft's checkpoint.

Asked of transformers on the meta device, which holds shapes only: the target's own modules may have been released after
packing. A few milliseconds per layer of the target.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from selfspec.target.stack import Target


def blank_layer_and_norm(target: Target) -> nn.ModuleDict:
    """`layer` (in the family's own names, the first of its stack) and `norm`."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(target.config)
    layers, norm = attrgetter(target.family.layers)(model), attrgetter(target.family.norm)(model)
    return nn.ModuleDict({"layer": layers[0], "norm": norm})
