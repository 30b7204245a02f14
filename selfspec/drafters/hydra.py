"""Hydra's heads (Ankner et al. 2024, arXiv 2402.05109): Medusa's, told what was drafted before them.

Head k (from 0) reads [h_t; E(x_{t+1}); ...; E(x_{t+1+k})], the target's last hidden state behind the final norm, the
pending token and every token drafted so far (E is the target's own embedding), and predicts token t+2+k. Its first
block narrows that to the target's width, R x + SiLU(L x); `num_blocks` − 1 residual blocks x + SiLU(A x + b) follow,
each with weights of its own, then an output matrix as Medusa's.

With `prefix` (Hydra++) h_t has gone through one more decoder layer of the target's kind, trained, behind the target's
last one, and through a norm of its own: it can look back over the text for what is more than one token ahead. The layer
keeps keys and values of every position from the target's true states, drafts have no part in them.

Checkpoint: config.json (num_heads, num_blocks, own_head, prefix, d_vocab, target) and model.safetensors, named as in
`HydraHeads`: `residual.{head}` (R), `blocks.{head}.{block}` (block 0 is L), `lm_head.{head}` (own heads),
`prefix.layer` and `prefix.norm`; `token_ids`.

Cost of drafting K tokens: head k streams 2 (k+2) M² weights and the output matrix once. Without a prefix layer there is
no cache; with one, a round runs it over the K+1 verified positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec.drafters.base import Draft, Seen
from selfspec.drafters.checkpoint import load_into, read_checkpoint
from selfspec.drafters.draft_layer import DraftLayer, blank_parts, target_like
from selfspec.drafters.heads import (
    Outputs,
    bytes_of,
    keep_state,
    linears,
    num_outputs,
    packed,
    read_count,
    read_flag,
    start_state,
    state_of,
)
from selfspec.target import Target
from selfspec.target.fused import RMSNorm

if TYPE_CHECKING:
    from selfspec.decoding.drafting import Drafting
    from selfspec.decoding.rows import Rows
    from selfspec.decoding.tree_drafting import Growing


@dataclass
class Options:
    """checkpoint: a folder with trained heads, made by experiments/train.py for this target."""

    checkpoint: str


class HydraHeads(nn.Module):
    """The weights. `state` is what training and reading agree on."""

    def __init__(
        self,
        width: int,
        num_heads: int,
        num_blocks: int,
        num_own_outputs: int = 0,
        own_bias: bool = False,
        prefix: nn.ModuleDict | None = None,
    ) -> None:
        """num_own_outputs: rows of each head's own output matrix; 0: the target's is used. own_bias: published heads
        add one to theirs; ours are trained without. prefix: `layer` and `norm`.
        """
        super().__init__()
        self.prefix = prefix
        reads = [(head + 2) * width for head in range(num_heads)]
        self.residual = nn.ModuleList(nn.Linear(read, width) for read in reads)
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(width if block else read, width) for block in range(num_blocks)) for read in reads
        )
        own = num_heads if num_own_outputs else 0
        self.lm_head = nn.ModuleList(nn.Linear(width, num_own_outputs, bias=own_bias) for _ in range(own))

    def state(self, head: int, read_NX: Tensor) -> Tensor:
        """`[N, M]`: one head's state, before its output matrix. X = (head + 2) M."""
        first, *further = linears(self.blocks[head])
        hidden_NM: Tensor = self.residual[head](read_NX) + F.silu(first(read_NX))
        for block in further:
            hidden_NM = hidden_NM + F.silu(block(hidden_NM))
        return hidden_NM


class Hydra:
    """Drafts up to one token per head."""

    name = "hydra"

    def __init__(self, target: Target, heads: HydraHeads, token_ids: Tensor | None = None) -> None:
        self.target = target
        self.max_drafted: int | None = len(heads.blocks)
        self.feature_layers: tuple[int, ...] = (target.num_layers,)
        blocks = [linears(head) for head in heads.blocks]
        self._first = [packed(wide, head[0]) for wide, head in zip(linears(heads.residual), blocks, strict=True)]
        self._further = [[packed(block) for block in head[1:]] for head in blocks]
        self._outputs = Outputs(target, linears(heads.lm_head), token_ids)
        self._weight_bytes = bytes_of(self._first, self._further, self._outputs)
        self._prefix: DraftLayer | None = None
        self._norm: Callable[[Tensor], Tensor] = target.norm
        if heads.prefix is not None:
            self._prefix = target_like(target, heads.prefix["layer"], target.num_layers - 1)
            self._weight_bytes += self._prefix.nbytes
            self._norm = RMSNorm(heads.prefix["norm"])

    def draft_bytes(self, num_rows: int, capacity: int) -> tuple[int, int]:
        state = num_rows * self.target.width * self.target.dtype.itemsize
        return self._weight_bytes, state + (self._prefix.cache_bytes(num_rows, capacity) if self._prefix else 0)

    def start(self, rows: Rows) -> None:
        start_state(self.target, rows, self._prefix.make_cache(rows) if self._prefix else None)

    def prefill(self, rows: Rows, seen: Seen) -> None:
        """The last state, behind the prefix layer where there is one: it runs on every position, once."""
        if self._prefix is None:
            keep_state(rows, seen)
            return
        state = state_of(rows)
        assert state.cache is not None and seen.features_BTF is not None
        pass_ = state.cache.open(seen.positions_BT, seen.extent, seen.rows)
        seen.keep(state.hidden_BM, self._prefix(seen.features_BTF, pass_))

    def refresh(self, rows: Rows, seen: Seen) -> None:
        self.prefill(rows, seen)

    def propose(self, rows: Rows, drafting: Drafting) -> Draft:
        read_B1X = self._norm(state_of(rows).hidden_BM[:, None])
        for step in drafting:
            last_B1M = self.target.embed(rows.window(step, 1))  # the pending token, then the drafted ones
            read_B1X = torch.cat([read_B1X, last_B1M], -1)
            drafting.draw(self._outputs(self._state(step, read_B1X), step)[:, 0])
        return drafting.draft()

    def propose_tree(self, rows: Rows, growing: Growing) -> Draft:
        """As a chain, each node on the tokens of its own path."""
        read_BnX = self._norm(state_of(rows).hidden_BM[:, None])
        for level in growing:
            nodes = growing.nodes
            if level > 0:
                read_BnX = growing.of_parents(read_BnX)
            last_BnM = self.target.embed(rows.window(nodes.start, nodes.stop - nodes.start))
            read_BnX = torch.cat([read_BnX, last_BnM], -1)
            growing.grow(self._outputs(self._state(level, read_BnX), level))
        return growing.draft()

    def _state(self, head: int, read_B1X: Tensor) -> Tensor:
        residual_B1M, gate_B1M = self._first[head](read_B1X).chunk(2, -1)
        hidden_B1M = residual_B1M + F.silu(gate_B1M)
        for block in self._further[head]:
            hidden_B1M = hidden_B1M + F.silu(block(hidden_B1M))
        return hidden_B1M


def build(target: Target, options: Options) -> Hydra:
    checkpoint = read_checkpoint(options.checkpoint, "hydra", target)
    num_heads, num_blocks = read_count(checkpoint, "num_heads"), read_count(checkpoint, "num_blocks")
    own = num_outputs(checkpoint, target) if read_flag(checkpoint, "own_head") else 0
    prefix = blank_parts(target, "hydra") if checkpoint.config.get("prefix") is True else None
    with torch.device("meta"):
        biased = checkpoint.config.get("own_bias") is True
        heads = HydraHeads(target.width, num_heads, num_blocks, own, biased, prefix)
    load_into(heads, checkpoint)
    return Hydra(target, heads, checkpoint.token_ids)
