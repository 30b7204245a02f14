"""Draft with another, smaller causal LM over the same vocabulary, with a cache of its own: the baseline of
self-speculation.

Leviathan et al. 2023. After a round in which everything was accepted, the draft model has not run the last drafted
token. Instead of a special case, every round starts with a pass over *two* tokens, the one before the pending token
and the pending token, which rewrites a slot with what it already holds (or fills the missing one): shapes stay fixed
and nothing is ever missing. After rounds without a draft that pass is as much wider (`Plan.behind`).

Cost: K steps of the small model, and a second prompt pass and cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from selfspec.cache import KVCache, kv_bytes_per_slot
from selfspec.cache.storage import slots_for
from selfspec.drafters.base import Draft, Seen
from selfspec.errors import UserError
from selfspec.target import Target, load_target

if TYPE_CHECKING:
    from selfspec.decoding.drafting import Drafting
    from selfspec.decoding.rows import Rows
    from selfspec.decoding.tree_drafting import TreeDrafting


@dataclass
class Options:
    """model: conf/target name, local folder, hub id, or (from Python) a `Target`."""

    model: Any


class Independent:
    """Drafts from `model`, a `Target` with the same tokenizer as the one it drafts for."""

    name = "independent"
    max_drafted: int | None = None

    def __init__(self, target: Target, model: Target) -> None:
        check_same_tokenizer(target, model)
        self.target = target
        self.model = model

    def check_capacity(self, num_tokens: int) -> None:
        """UserError unless the draft model has positions for prompt and output."""
        if num_tokens > self.model.max_positions:
            raise UserError(
                f"The draft model {self.model.name} has {self.model.max_positions} positions; prompt and output need "
                f"{num_tokens}. Ask for fewer new tokens or use another draft model."
            )

    def draft_bytes(self, num_rows: int, capacity: int) -> tuple[int, int]:
        kv_bytes = kv_bytes_per_slot(self.model.layer_shapes, self.model.dtype)
        own = 0 if self.model is self.target else self.model.weight_bytes
        return own, num_rows * slots_for(capacity) * kv_bytes

    def start(self, rows: Rows) -> None:
        rows.draft_state = self.model.make_cache(rows.num_rows, rows.capacity)

    def prefill(self, rows: Rows, seen: Seen) -> None:
        """A chunk, and the token before it: a row that goes on from an earlier request may not have run that one."""
        before_B1 = torch.where(seen.positions_BT[:, :1] > 0, seen.positions_BT[:, :1] - 1, -1)
        token_ids_BT = rows.tokens_BS[seen.rows].gather(1, before_B1.clamp(min=0))
        pass_ = _cache_of(rows).open(torch.cat([before_B1, seen.positions_BT], 1), seen.extent, seen.rows)
        hidden_BTM = self.model.embed(torch.cat([token_ids_BT, seen.token_ids_BT], 1))
        self.model.run_layers(hidden_BTM, 0, self.model.num_layers, pass_)

    def propose(self, rows: Rows, drafting: Drafting) -> Draft:
        behind = drafting.plan.behind
        for step in drafting:
            first, width = (-1 - behind, 2 + behind) if step == 0 else (step, 1)
            pass_ = _cache_of(rows).open(rows.positions(first, width), rows.extent(first, width))
            hidden_BTM = self.model.embed(rows.window(first, width))
            hidden_BTM = self.model.run_layers(hidden_BTM, 0, self.model.num_layers, pass_)
            drafting.draw(self.model.head(hidden_BTM[:, -1:])[:, 0])
        return drafting.draft()

    def propose_tree(self, rows: Rows, growing: TreeDrafting) -> Draft:
        cache, extent, behind = _cache_of(rows), rows.extent(0, growing.plan.width), growing.plan.behind
        for level in growing:
            nodes = growing.nodes
            if level == 0:
                first, width = -1 - behind, 2 + behind
                pass_ = cache.open(rows.positions(first, width), rows.extent(first, width))
            else:
                first, width = nodes.start, nodes.stop - nodes.start
                positions_BT, block = growing.block(nodes)
                pass_ = cache.open(positions_BT, extent, tree=block)
            hidden_BTM = self.model.embed(rows.window(first, width))
            hidden_BTM = self.model.run_layers(hidden_BTM, 0, self.model.num_layers, pass_)
            growing.grow(self.model.head(hidden_BTM[:, -1:] if level == 0 else hidden_BTM))
        return growing.draft()


def _cache_of(rows: Rows) -> KVCache:
    assert isinstance(rows.draft_state, KVCache), "start() was not called for these rows"
    return rows.draft_state


def check_same_tokenizer(target: Target, draft: Target) -> None:
    """UserError unless both models mean the same text by the same ids."""
    if target.vocab_size != draft.vocab_size:
        raise UserError(
            f"The draft model {draft.name} has a vocabulary of {draft.vocab_size} tokens, the target {target.name} "
            f"one of {target.vocab_size}. An independent draft needs the same tokenizer."
        )
    if target.tokenizer is None or draft.tokenizer is None:
        return
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if ours != theirs:
        differing = next(token for token in {**ours, **theirs} if ours.get(token) != theirs.get(token))
        raise UserError(
            f"The draft model {draft.name} has another tokenizer than the target {target.name}: the token "
            f"{differing!r} has id {theirs.get(differing)} there and {ours.get(differing)} here. "
            "An independent draft needs the same tokenizer."
        )


def build(target: Target, options: Options) -> Independent:
    model = options.model
    if not isinstance(model, Target):
        model = load_target(model, dtype=str(target.dtype).removeprefix("torch."), device=str(target.device))
    return Independent(target, model)
