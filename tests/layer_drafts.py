"""Drafts made of a trained layer (eagle3, exit_adapter, mtp) with random weights, as training leaves them; and what
they must draft, computed from scratch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from selfspec import load_drafter
from selfspec.drafters import Drafter
from selfspec.target import Target
from selfspec.target import packed as packing
from selfspec.training.draft_vocab import write_draft_vocab
from selfspec.training.trainee import Trainee, build_trainee
from selfspec.training.unrolled import Unrollable


def random_trainee(
    kind: str, target: Target, folder: Path, d_vocab: int | None = None, seed: int = 0, **options: Any
) -> Trainee:
    """A trainee whose drafts differ from position to position and from token to token."""
    generator = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    if d_vocab is not None:
        others = torch.randperm(target.vocab_size, generator=generator)
        eos = torch.tensor(target.eos_token_ids, dtype=torch.int64)
        ids = torch.cat([eos, others[~torch.isin(others, eos)]]).numpy()
        write_draft_vocab(folder / "vocab.safetensors", ids, np.ones(target.vocab_size), target.fingerprint)
        options |= {"draft_vocab": str(folder / "vocab.safetensors"), "d_vocab": d_vocab}
    trainee = build_trainee(kind, target, options)
    with torch.no_grad():
        for name, parameter in trainee.module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.4 * noise)
            parameter.copy_(parameter.to(torch.bfloat16))  # as it is saved
    return trainee


def random_draft(kind: str, target: Target, folder: Path, **options: Any) -> Path:
    random_trainee(kind, target, folder, **options).save(folder)
    return folder


def random_drafter(kind: str, target: Target, packed: bool = True, **options: Any) -> Drafter:
    """A random draft on `target`'s device, written and read. packed: as the CPU would have it, or plainly as a GPU."""
    with TemporaryDirectory() as folder, nullcontext() if packed else patch.object(packing, "_checked", refuse):
        return load_drafter(random_draft(kind, target, Path(folder), **options), target)


def refuse(*_: object) -> None:
    raise RuntimeError("plain weights are wanted")


def features_of(target: Target, token_ids: list[int], layers: tuple[int, ...]) -> Tensor:
    """`[1, T, F]` by one pass over the whole text on a cache of its own."""
    pass_ = target.make_cache(1, len(token_ids)).open(torch.arange(len(token_ids))[None], len(token_ids))
    _, features = target.run_tapped(target.embed(torch.tensor([token_ids])), 0, target.num_layers, pass_, layers)
    assert features is not None
    return features


@torch.no_grad()
def chained_drafts(
    target: Target,
    layer: Unrollable,
    hidden_1TM: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    context: list[int],
    num_drafted: int,
    window: int | None = None,
) -> list[int]:
    """Greedy drafts of a layer that reads its own output: keys and values of all of `context` made anew from
    `hidden_1TM`, what its tokens but the last, the pending one, were turned into.
    """
    start, drafted, output = len(context) - 2, list[int](), torch.zeros(1, 1, target.width)
    keys = values = None
    for j in range(num_drafted):
        ids = [*context, *drafted]
        if start >= 0 or j > 0:  # a text of one token has nothing before the pending one
            first = 0 if j == 0 else start + j
            positions = torch.arange(first, start + j + 1)[None]
            embedded = target.embed(torch.tensor([ids[first + 1 : start + j + 2]]))
            query, key, value, residual = layer.enter(embedded, hidden_1TM if j == 0 else output, positions)
            keys = key if keys is None else torch.cat([keys, key], 1)
            values = value if values is None else torch.cat([values, value], 1)
            repeat = query.shape[2] // key.shape[2]
            from_ = 0 if window is None else max(0, start + j + 1 - window)
            k, v = (x[:, from_:].repeat_interleave(repeat, 2).transpose(1, 2) for x in (keys, values))
            last = query[:, -1:].transpose(1, 2)
            attended = torch.nn.functional.scaled_dot_product_attention(last, k, v).transpose(1, 2)
            output = layer.leave(residual[:, -1:], attended)
        drafted.append(int(logits_of(output)[0, 0].argmax()))
    return drafted
