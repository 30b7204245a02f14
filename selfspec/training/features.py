"""The target's hidden states on the training text, computed once and kept beside the data, for drafts that read them.

For each token the states entering the asked layers (layer L: leaving the last one, before the final norm), in bfloat16:
1,152 bytes a layer for SmolLM2. One file per layer and shard, written atomically, keyed by the shard's sha256 and the
target's fingerprint, so that drafts which read different layers share what they have in common; `observe_data` runs the
target once for all of them, and for the distributions that every draft is trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from selfspec.target import Target
from selfspec.training.data import Dataset, Sample, Shard, check_made_by, write_atomically
from selfspec.training.teacher import is_of, observed, teachers_at, write_teachers


class Features(Sequence[Tensor]):
    """Per sample `[tokens, len(layers) * M]` bfloat16, read from its shard whenever it is asked for: gigabytes stay on
    the disk and in its cache, which all who train on them share.
    """

    def __init__(self) -> None:
        self._files: list[list[Any]] = []  # by shard, by layer
        self._places: list[tuple[int, int, int]] = []  # by sample: shard, first and last token

    def add_shard(self, paths: Sequence[Path], lengths: Sequence[int]) -> list[int]:
        """The numbers of its samples."""
        first = len(self._places)
        edges = [0, *accumulate(lengths)]
        self._places += [(len(self._files), begin, end) for begin, end in pairwise(edges)]
        self._files.append([safe_open(path, framework="pt") for path in paths])
        return list(range(first, len(self._places)))

    def of(self, numbers: Sequence[int]) -> Features:
        """These samples only, in this order."""
        chosen = Features()
        chosen._files, chosen._places = self._files, [self._places[number] for number in numbers]
        return chosen

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: Any) -> Any:
        shard, begin, end = self._places[number]
        return torch.cat([file.get_slice("features")[begin:end] for file in self._files[shard]], dim=-1)


def features_for(
    target: Target,
    dataset: Dataset,
    identity: dict[str, Any],
    layers: Sequence[int],
    progress: Callable[[str], None] = print,
) -> Callable[[Sequence[Sample]], Features]:
    """Gives the hidden states of any samples of the dataset, computing what is not kept yet."""
    observe_data(target, dataset, identity, layers, num_kept=0, progress=progress)
    features, number_of = Features(), {}
    for shard in dataset.shards:
        paths = [_features_at(shard, identity, layer) for layer in layers]
        numbers = features.add_shard(paths, [len(sample.token_ids) for sample in shard.samples])
        number_of.update({sample.index: number for sample, number in zip(shard.samples, numbers, strict=True)})
    return lambda chosen: features.of([number_of[sample.index] for sample in chosen])


def observe_data(
    target: Target,
    dataset: Dataset,
    identity: dict[str, Any],
    layers: Sequence[int],
    *,
    num_kept: int,
    progress: Callable[[str], None] = print,
) -> None:
    """Compute what is not kept yet: hidden states entering `layers` and (num_kept > 0) the target's distributions.
    UserError when this target did not make the data.
    """
    check_made_by(dataset, identity)
    for shard in dataset.shards:
        missing = [layer for layer in sorted(set(layers)) if not is_of(_features_at(shard, identity, layer), shard)]
        teachers = teachers_at(shard, identity, num_kept) if num_kept else None
        wanted = num_kept if teachers is not None and not is_of(teachers, shard) else 0
        if not missing and not wanted:
            continue
        progress(f"target on {shard.path}: layers {missing}" + (f", {wanted} likeliest tokens" if wanted else ""))
        seen = observed(target, shard.samples, wanted, missing)
        for i, layer in enumerate(missing):
            tensors = {"features": torch.cat([states[i] for _, states in seen])}
            metadata = {"shard_sha256": shard.sha256}
            path = _features_at(shard, identity, layer)
            write_atomically(path, lambda partial, t=tensors, m=metadata: save_file(t, partial, metadata=m))
        if wanted and teachers is not None:
            write_teachers(teachers, [teacher for teacher, _ in seen], shard)


def hidden_states(target: Target, samples: Sequence[Sample], layers: Sequence[int]) -> list[Tensor]:
    """Per sample `[tokens, len(layers) * M]` bfloat16 on the CPU."""
    return [torch.cat(states, dim=-1) for _, states in observed(target, samples, 0, layers)]


def _features_at(shard: Shard, identity: dict[str, Any], layer: int) -> Path:
    kept = shard.path.parent / f"features-{identity['fingerprint']}-layer{layer}"
    kept.mkdir(exist_ok=True)
    return kept / shard.path.name
