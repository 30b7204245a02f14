"""The target's own distributions on the training text, computed once and kept beside the data.

For every answer token its K likeliest alternatives and their log-probabilities (float16): 6 bytes each, 77 MB for
0.4 M tokens at K=32, instead of a forward pass of the target in every epoch. One file per shard, written atomically,
keyed by the shard's sha256 and the target's fingerprint; a killed run goes on at the first shard that has none.

Costs one forward pass of the target: about 2,000 tokens/s on 2 cores in bfloat16 for SmolLM2-135M.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import Tensor

from selfspec.cache import Pass
from selfspec.target import Target
from selfspec.training.batches import Teacher
from selfspec.training.data import Dataset, Sample, Shard, check_made_by, write_atomically

ROWS = 16


def teachers_for(
    target: Target,
    dataset: Dataset,
    identity: dict[str, Any],
    *,
    num_kept: int,
    progress: Callable[[str], None] = print,
) -> dict[int, Teacher]:
    """Sample index -> Teacher for every sample of the dataset, computing what is not kept yet. UserError when this
    target did not make the data.
    """
    check_made_by(dataset, identity)
    teachers: dict[int, Teacher] = {}
    for shard in dataset.shards:
        path = teachers_at(shard, identity, num_kept)
        if not is_of(path, shard):
            progress(f"target distributions for {shard.path}")
            write_teachers(path, distributions(target, shard.samples, num_kept), shard)
        teachers.update(_read(path, shard.samples))
    return teachers


def teachers_at(shard: Shard, identity: dict[str, Any], num_kept: int) -> Path:
    """The file that keeps the distributions of a shard's samples; its folder is made."""
    kept = shard.path.parent / f"teacher-{identity['fingerprint']}-k{num_kept}"
    kept.mkdir(exist_ok=True)
    return kept / shard.path.name


@torch.inference_mode()
def distributions(target: Target, samples: Sequence[Sample], num_kept: int) -> list[Teacher]:
    """Run the target over known text, in rows of similar length; keep the likeliest tokens per answer position."""
    return [teacher for teacher, _ in observed(target, samples, num_kept, ())]


@torch.inference_mode()
def observed(
    target: Target, samples: Sequence[Sample], num_kept: int, layers: Sequence[int]
) -> list[tuple[Teacher, list[Tensor]]]:
    """One forward pass for both: each sample's distributions, and the hidden states entering `layers`, `[tokens, M]`
    each, in bfloat16 on the CPU. num_kept 0: no distributions, and no layer beyond the highest of `layers` is run.
    """
    found: dict[int, tuple[Teacher, list[Tensor]]] = {}
    for members, pass_, token_ids in padded_rows(target, samples, ROWS):
        last_layer = target.num_layers if num_kept else max(layers)
        taps = tuple(layers)
        hidden_BTM, features_BTF = target.run_tapped(target.embed(token_ids), 0, last_layer, pass_, taps)
        states = [] if features_BTF is None else features_BTF.to("cpu", torch.bfloat16).split(target.width, dim=-1)
        for row, i in enumerate(members):
            teacher = _teacher(target, hidden_BTM[row : row + 1], samples[i], num_kept)
            found[i] = teacher, [state[row, : len(samples[i].token_ids)].clone() for state in states]
    return [found[i] for i in range(len(samples))]


def _teacher(target: Target, hidden_1TM: Tensor, sample: Sample, num_kept: int) -> Teacher:
    if num_kept == 0:
        return Teacher(np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float16))
    logits = target.head(hidden_1TM[:, sample.prompt_len - 1 : len(sample.token_ids) - 1])[0].float()
    logp, ids = torch.topk(logits, num_kept, dim=-1)
    logp = logp - torch.logsumexp(logits, dim=-1, keepdim=True)
    return Teacher(ids.to("cpu", torch.int32).numpy(), logp.clamp(min=-60).to("cpu", torch.float16).numpy())


def padded_rows(target: Target, samples: Sequence[Sample], rows: int) -> Iterator[tuple[list[int], Pass, Tensor]]:
    """Samples side by side, those of similar length together: (which samples, a pass over them, ids [rows, T])."""
    by_length = sorted(range(len(samples)), key=lambda i: len(samples[i].token_ids))
    if not by_length:
        return
    cache = target.make_cache(rows, len(samples[by_length[-1]].token_ids))
    for begin in range(0, len(by_length), rows):
        members = by_length[begin : begin + rows]
        width = max(len(samples[i].token_ids) for i in members)
        token_ids = torch.zeros(rows, width, dtype=torch.int64)
        positions = torch.full((rows, width), -1, dtype=torch.int64)
        for row, i in enumerate(members):
            length = len(samples[i].token_ids)
            token_ids[row, :length] = torch.tensor(samples[i].token_ids)
            positions[row, :length] = torch.arange(length)
        yield members, cache.open(positions.to(target.device), width), token_ids.to(target.device)


def write_teachers(path: Path, teachers: Sequence[Teacher], shard: Shard) -> None:
    tensors = {
        "ids": np.concatenate([teacher.ids_AK for teacher in teachers]),
        "logp": np.concatenate([teacher.logp_AK for teacher in teachers]),
    }
    write_atomically(path, lambda partial: save_file(tensors, partial, metadata={"shard_sha256": shard.sha256}))


def is_of(path: Path, shard: Shard) -> bool:
    """Whether `path` holds what was computed from this very shard."""
    if not path.exists():
        return False
    with safe_open(path, framework="numpy") as file:
        return bool(file.metadata()["shard_sha256"] == shard.sha256)


def _read(path: Path, samples: Sequence[Sample]) -> dict[int, Teacher]:
    with safe_open(path, framework="numpy") as file:
        ids, logp = file.get_tensor("ids"), file.get_tensor("logp")
    edges = np.cumsum([0, *(sample.answer_len for sample in samples)])
    return {
        sample.index: Teacher(ids[a:b], logp[a:b]) for sample, a, b in zip(samples, edges[:-1], edges[1:], strict=True)
    }
