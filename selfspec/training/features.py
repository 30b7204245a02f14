"""The target's hidden states on the training text, computed once and kept beside the data, for drafts that read them.

For each token the states entering the asked layers (layer L: leaving the last one, before the final norm), in bfloat16:
1,152 bytes a layer for SmolLM2. One file per shard, written atomically, keyed by the shard's sha256 and the target's
fingerprint. Costs one forward pass up to the highest of those layers; then they are read into memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from selfspec.target import Target
from selfspec.training.data import Dataset, Sample, read_shard, write_atomically
from selfspec.training.teacher import is_of, padded_rows

ROWS = 16


def features_for(
    target: Target,
    folder: str | Path,
    dataset: Dataset,
    identity: dict[str, Any],
    layers: Sequence[int],
    progress: Callable[[str], None] = print,
) -> dict[int, Tensor]:
    """Sample index -> `[tokens, len(layers) * M]` bfloat16 for every sample, computing what is not kept yet."""
    folder = Path(folder).expanduser()
    kept = folder / f"features-{identity['fingerprint']}-{'-'.join(map(str, layers))}"
    kept.mkdir(exist_ok=True)
    found: dict[int, Tensor] = {}
    for shard in dataset.manifest["shards"]:
        samples, _, _ = read_shard(folder / shard["file"])
        path = kept / shard["file"]
        if not is_of(path, shard["sha256"]):
            progress(f"target features for {shard['file']}")
            tensors = {"features": torch.cat(hidden_states(target, samples, layers))}
            metadata = {"shard_sha256": shard["sha256"]}
            write_atomically(path, lambda partial, t=tensors, m=metadata: save_file(t, partial, metadata=m))
        with safe_open(path, framework="pt") as file:
            parts = file.get_tensor("features").split([len(sample.token_ids) for sample in samples])
        found.update({sample.index: part for sample, part in zip(samples, parts, strict=True)})
    return found


@torch.inference_mode()
def hidden_states(target: Target, samples: Sequence[Sample], layers: Sequence[int]) -> list[Tensor]:
    """Per sample `[tokens, len(layers) * M]` bfloat16 on the CPU."""
    found: dict[int, Tensor] = {}
    for members, pass_, token_ids in padded_rows(target, samples, ROWS):
        hidden_BTM, at, wanted = target.embed(token_ids), 0, {}
        for layer in sorted(set(layers)):
            hidden_BTM = target.run_layers(hidden_BTM, at, layer, pass_)
            wanted[layer], at = hidden_BTM.to("cpu", torch.bfloat16), layer
        together = torch.cat([wanted[layer] for layer in layers], dim=-1)
        for row, i in enumerate(members):
            found[i] = together[row, : len(samples[i].token_ids)].clone()
    return [found[i] for i in range(len(samples))]
