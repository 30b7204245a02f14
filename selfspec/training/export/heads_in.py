"""Published Medusa and Hydra heads as ours.

Medusa's authors have two layouts under the same names, `{head}.{block}.linear.{weight,bias}`: the first ends every head
with an output matrix of its own, `{head}.{num_blocks}.weight`; the second ("version": "2") borrows the target's. Which
one a folder holds is read off its weights. Some files carry the prefix `medusa_head.`.

Hydra's: `hydra_mlp.{head}.{block}.linear`, the first block's `res_connection`, and `hydra_lm_head.{head}` with a bias;
where dropout was configured it takes every other place, so blocks are counted, not read off the names. Read are the
heads of the paper's first design (hydra_head_arch "mlp", grounded); Hydra++'s need an attention layer ours do not have.

Both repeat one module object where a head has several blocks (`[Block] * n`), so they share weights and a file may hold
them once: the missing ones are copies.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.drafters.hydra import HydraHeads
from selfspec.drafters.medusa import MedusaHeads
from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.training.export.folders import Folder, check_tensors


def is_medusa(source: Folder) -> bool:
    return any(name.startswith("medusa_") for name in source.config)


def is_hydra(source: Folder) -> bool:
    return any(name.startswith("hydra_") for name in source.config)


def import_medusa(source: Folder, target: Target) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Our config.json (all but the target) and tensors, in the source's dtype.

    UserError: more or fewer heads than config.json says, another width or vocabulary, missing or unread weights.
    """
    num_heads, num_blocks = (_count(source, f"medusa_num_{what}") for what in ("heads", "layers"))
    tensors: dict[str, Tensor] = {}
    for name, tensor in source.tensors.items():
        plain = name.removeprefix("medusa_head.")
        if block := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", plain):
            plain = "blocks.{}.{}.{}".format(*block.groups())
        elif (matrix := re.fullmatch(r"(\d+)\.(\d+)\.weight", plain)) and int(matrix[2]) == num_blocks:
            plain = f"lm_head.{matrix[1]}.weight"
        tensors[plain] = tensor
    return _finish(source, target, "medusa", num_heads, num_blocks, tensors)


def import_hydra(source: Folder, target: Target) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As `import_medusa`; UserError also for the designs that are not ours."""
    for key, ours in (("hydra_head_arch", "mlp"), ("grounded_heads", True), ("hidden_state_offset", 0)):
        if source.config.get(key) != ours:
            raise UserError(
                f"{source.path} has {key}={source.config.get(key)!r}; read are heads with {key}={ours!r}, which see "
                "the target's last hidden state and the drafted tokens, and nothing else."
            )
    num_heads, num_blocks = (_count(source, f"hydra_num_{what}") for what in ("heads", "layers"))
    tensors: dict[str, Tensor] = {}
    for name, tensor in source.tensors.items():
        plain = name
        if block := re.fullmatch(r"hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)", name):
            head, place, which, part = block.groups()
            index = _places(source, head).index(int(place))
            plain = f"blocks.{head}.{index}.{part}" if which == "linear" else f"residual.{head}.{part}"
        elif matrix := re.fullmatch(r"hydra_lm_head\.(\d+)(?:\.1)?\.(weight|bias)", name):
            plain = f"lm_head.{matrix[1]}.{matrix[2]}"
        tensors[plain] = tensor
    return _finish(source, target, "hydra", num_heads, num_blocks, tensors)


def _places(source: Folder, head: str) -> list[int]:
    """Where a head's blocks stand among its modules, dropout in between."""
    found = (re.match(rf"hydra_mlp\.{head}\.(\d+)\.linear\.", name) for name in source.tensors)
    return sorted({int(place[1]) for place in found if place})


def _count(source: Folder, name: str) -> int:
    count = source.config.get(name)
    if not isinstance(count, int) or count < 1:
        raise UserError(f"{source.path / 'config.json'} says {name}={count!r}; needed is how many its weights hold.")
    return count


def _finish(
    source: Folder,
    target: Target,
    kind: str,
    num_heads: int,
    num_blocks: int,
    tensors: dict[str, Tensor],
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    own = any(name.startswith("lm_head.") for name in tensors)
    if not own:
        _check_plain_logits(source, target)
    first = 0 if kind == "medusa" else 1  # Hydra's first block is wider than those that are repeated
    for head in range(num_heads):
        for block in range(first + 1, num_blocks):
            if f"blocks.{head}.{block}.weight" not in tensors:
                for part in ("weight", "bias"):
                    if (repeated := tensors.get(f"blocks.{head}.{first}.{part}")) is not None:
                        tensors[f"blocks.{head}.{block}.{part}"] = repeated.clone()
    rows, biased = target.vocab_size if own else 0, any(re.fullmatch(r"lm_head\.\d+\.bias", name) for name in tensors)
    with torch.device("meta"):
        heads: nn.Module = MedusaHeads(target.width, num_heads, num_blocks, rows)
        if kind == "hydra":
            heads = HydraHeads(target.width, num_heads, num_blocks, rows, biased)
    check_tensors(source.path, tensors, heads.state_dict())
    config = {"kind": kind, "num_heads": num_heads, "num_blocks": num_blocks, "own_head": own, "d_vocab": None}
    return config | ({"own_bias": biased} if kind == "hydra" else {}), tensors


def _check_plain_logits(source: Folder, target: Target) -> None:
    probe = torch.linspace(-9, 9, 3)
    if not torch.equal(probe, target.family.finish_logits(probe, target.config)):
        raise UserError(
            f"{source.path} borrows the output matrix of its target, and {target.name} scales or caps its logits "
            "behind it, which these heads were not made for."
        )
