"""What a draft and its data belong to: a fingerprint of the target and of its chat template."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from selfspec.target import Target


def target_identity(target: Target, template_text: str = "") -> dict[str, Any]:
    """Name, shape and fingerprint of a target, the same for every dtype it may be loaded in; milliseconds.

    The fingerprint covers the shape, every norm weight and part of every matrix, rounded to bfloat16.
    """
    shape = {"vocab_size": target.vocab_size, "num_layers": target.num_layers, "width": target.width}
    digest = hashlib.sha256(repr(sorted(shape.items())).encode())
    module: nn.Module = target.hf_model
    for name, parameter in sorted(module.named_parameters()):
        part = parameter.detach().flatten()[:512].to("cpu", torch.bfloat16).view(torch.int16)
        digest.update(name.encode() + part.numpy().tobytes())
    template = hashlib.sha256(template_text.encode()).hexdigest()[:16]
    return {"name": target.name, **shape, "fingerprint": digest.hexdigest()[:16], "template": template}
