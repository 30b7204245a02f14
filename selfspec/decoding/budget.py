"""Will it fit? Asked before anything is allocated, answered with what would.

A model that does not fit fails when it is loaded; a cache that does not fit may be granted by the operating system and
end the process rounds later, when the pages are first written. So a `Decoder` compares `selfspec.cache.estimate` with
what is free on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch

from selfspec.cache import Storage
from selfspec.cache.estimate import Call, DraftBytes, Estimate, ModelShape, estimate, ways_to_fit
from selfspec.config import SamplingConfig
from selfspec.decoding.sampler import Sampler
from selfspec.drafters import Drafter
from selfspec.drafters.base import Sized
from selfspec.errors import UserError
from selfspec.sampling import Sampling
from selfspec.target import Target
from selfspec.target.fused import FusedLayer

CGROUP_LIMITS = (  # version 2, version 1: what a container may use, and what it does use
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def shape_of(target: Target) -> ModelShape:
    """A loaded model's shape, with the bytes that its weights take as they are, packed or plain."""
    config = target.config
    layers = target.layer_shapes
    kv_width = sum(shape.num_kv_heads * shape.head_dim for shape in layers)
    heads, dim = config.num_attention_heads, layers[0].head_dim
    fused = any(isinstance(layer, FusedLayer) for layer in target.layers)
    inner = next((getattr(config, name) for name in ("intermediate_size", "ffn_dim") if getattr(config, name, 0)), 0)
    return ModelShape(
        weight_bytes=target.weight_bytes,
        kv_bytes_per_token=2 * kv_width * target.dtype.itemsize,
        num_layers=len(layers),
        vocab_size=target.vocab_size,
        width=target.width,
        intermediate_size=inner or 4 * target.width,
        queries_per_group=target.queries_per_group,
        head_dim=dim,
        itemsize=target.dtype.itemsize,
        num_masks=len(set(target.windows)),
        rotary_width=2 * (heads + 2 * layers[0].num_kv_heads) * dim if fused else 0,
        scored_heads=heads if getattr(config, "attn_logit_softcapping", None) else 0,
    )


def call_of(
    target: Target,
    storage: Storage,
    num_rows: int,
    needs: Sequence[int],
    width: int,
    sampler: Sampler,
    longest_prompt: int | None = None,
) -> Call:
    """What a decode call asks for, as the arithmetic sees it. width: the tokens of a round, K+1."""
    sampling = getattr(sampler.transforms, "sampling", Sampling())
    return Call(
        num_rows=num_rows,
        needs=needs,
        num_drafted=width - 1,
        storage=storage,
        rule=sampler.rule.name,
        draws_q=sampler.rule.needs_q,
        sampling=SamplingConfig(**{one.name: getattr(sampling, one.name) for one in fields(SamplingConfig)}),
        on_cpu=target.device.type == "cpu",
        longest_prompt=longest_prompt,
    )


def estimate_call(target: Target, drafter: Drafter, call: Call) -> Estimate:
    """What decoding takes: `estimate` on what is loaded."""
    return estimate(shape_of(target), call, _draft_bytes(drafter))


def refuse_if_too_large(target: Target, drafter: Drafter, call: Call, limit: int | None, freed: int = 0) -> None:
    """UserError when the call does not fit into `limit` bytes (None: what is free on the device, and `freed`)."""
    free = limit if limit is not None else available_bytes(target.device)
    if free is None:
        return
    free += freed if limit is None else 0
    needed = estimate_call(target, drafter, call)
    if needed.allocated_bytes <= free:
        return
    ways = ways_to_fit(shape_of(target), call, free, _draft_bytes(drafter))
    raise UserError(
        f"{call.num_rows} rows of up to {max(call.needs)} tokens (prompt, output, one round) need "
        f"{_size(needed.allocated_bytes)} beside the weights (keys and values {_size(needed.kv_bytes)}, draft "
        f"{_size(needed.draft_state_bytes)}, working memory {_size(needed.working_bytes)}); free on {target.device} "
        f"are {_size(free)}. Would fit: {', or '.join(ways) or 'nothing; free some memory first'}."
    )


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a device; None where that cannot be told."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    amounts = [_number(limit) - _number(usage) for limit, usage in CGROUP_LIMITS if _number(limit) > 0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        amounts += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        pass
    return max(min(amounts), 0) if amounts else None


def _number(path: str) -> int:
    """0 where there is no such file or it holds `max`."""
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return 0


def _draft_bytes(drafter: Drafter) -> DraftBytes | None:
    return drafter.draft_bytes if isinstance(drafter, Sized) else None


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"
