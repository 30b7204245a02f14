"""Medusa's heads (Cai et al. 2024, arXiv 2401.10774): every draft of a round from one hidden state, all at once.

With h_t the target's last hidden state behind the final norm, head k (from 0) predicts token t+2+k; token t+1 is the
pending one, already drawn from the target itself. A head is `num_blocks` residual blocks, x + SiLU(A x + b), each with
weights of its own and A = 0 to begin with, then an output matrix: the target's own (frozen, all tokens or a reduced
vocabulary), or one for each head (`own_head`). Heads do not know what the heads before them drafted: see `hydra`.

Checkpoint: config.json (num_heads, num_blocks, own_head, d_vocab, target) and model.safetensors, named as in
`MedusaHeads`: `blocks.{head}.{block}`, `lm_head.{head}` (own heads), and `token_ids` of a reduced vocabulary.

Cost of a whole draft: one product with all heads' first blocks, K small ones per further block, and one pass over the
output matrix, whatever K is. There is no cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec.drafters.base import Draft, Seen
from selfspec.drafters.checkpoint import load_into, read_checkpoint
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

if TYPE_CHECKING:
    from selfspec.decoding.drafting import Drafting
    from selfspec.decoding.rows import Rows
    from selfspec.decoding.tree_drafting import Growing


@dataclass
class Options:
    """checkpoint: a folder with trained heads, made by experiments/train.py for this target."""

    checkpoint: str


class MedusaHeads(nn.Module):
    """The weights. `states` is what training and reading agree on."""

    def __init__(self, width: int, num_heads: int, num_blocks: int, num_own_outputs: int = 0) -> None:
        """num_own_outputs: rows of each head's own output matrix; 0: the target's is used."""
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(width, width) for _ in range(num_blocks)) for _ in range(num_heads)
        )
        own = num_heads if num_own_outputs else 0
        self.lm_head = nn.ModuleList(nn.Linear(width, num_own_outputs, bias=False) for _ in range(own))

    def states(self, hidden_NM: Tensor) -> Tensor:
        """`[K, N, M]`: each head's state, before its output matrix."""
        return torch.stack([self._state(head, hidden_NM) for head in range(len(self.blocks))])

    def _state(self, head: int, hidden_NM: Tensor) -> Tensor:
        for block in linears(self.blocks[head]):
            hidden_NM = hidden_NM + F.silu(block(hidden_NM))
        return hidden_NM


class Medusa:
    """Drafts up to one token per head."""

    name = "medusa"

    def __init__(self, target: Target, heads: MedusaHeads, token_ids: Tensor | None = None) -> None:
        self.target = target
        self.max_drafted: int | None = len(heads.blocks)
        self.feature_layers: tuple[int, ...] = (target.num_layers,)
        blocks = [linears(head) for head in heads.blocks]
        self._first = packed(*(head[0] for head in blocks))
        self._further = [[packed(block) for block in head[1:]] for head in blocks]
        self._outputs = Outputs(target, linears(heads.lm_head), token_ids)
        self._weight_bytes = bytes_of([self._first], self._further, self._outputs)

    def draft_bytes(self, num_rows: int, capacity: int) -> tuple[int, int]:
        return self._weight_bytes, num_rows * self.target.width * self.target.dtype.itemsize

    def start(self, rows: Rows) -> None:
        start_state(self.target, rows)

    def prefill(self, rows: Rows, seen: Seen) -> None:
        keep_state(rows, seen)

    def refresh(self, rows: Rows, seen: Seen) -> None:
        keep_state(rows, seen)

    def propose(self, rows: Rows, drafting: Drafting) -> Draft:
        states_BKM = self._states(state_of(rows).hidden_BM[:, None], drafting.plan.num_drafted)
        logits_BKV = self._outputs(states_BKM) if drafting.plan.num_drafted else states_BKM
        for step in drafting:
            drafting.draw(logits_BKV[:, step])
        return drafting.draft()

    def propose_tree(self, rows: Rows, growing: Growing) -> Draft:
        """A head's candidates are the same below every node of its level: it has not seen which were drawn."""
        states_BKM = self._states(state_of(rows).hidden_BM[:, None], growing.plan.num_drafted)
        logits_BKV = self._outputs(states_BKM)
        for level in growing:
            growing.grow(logits_BKV[:, level : level + 1])
        return growing.draft()

    def _states(self, hidden_B1M: Tensor, num_drafted: int) -> Tensor:
        """`[B, K, M]` of the first K heads."""
        hidden_B1M = self.target.norm(hidden_B1M)
        first_BKM = self._first(hidden_B1M).unflatten(-1, (-1, self.target.width))[:, 0, :num_drafted]
        states_BKM = hidden_B1M + F.silu(first_BKM)
        if not self._further[0]:
            return states_BKM
        each = list(states_BKM.split(1, 1))
        for head, blocks in enumerate(self._further[:num_drafted]):
            for block in blocks:
                each[head] = each[head] + F.silu(block(each[head]))
        return torch.cat(each, 1)


def build(target: Target, options: Options) -> Medusa:
    checkpoint = read_checkpoint(options.checkpoint, "medusa", target)
    num_heads, num_blocks = read_count(checkpoint, "num_heads"), read_count(checkpoint, "num_blocks")
    own = num_outputs(checkpoint, target) if read_flag(checkpoint, "own_head") else 0
    with torch.device("meta"):
        heads = MedusaHeads(target.width, num_heads, num_blocks, own)
    load_into(heads, checkpoint)
    return Medusa(target, heads, checkpoint.token_ids)
