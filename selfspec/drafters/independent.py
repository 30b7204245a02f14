"""Draft with another, smaller causal LM over the same vocabulary, with a cache of its own: the baseline of
self-speculation.

Leviathan et al. 2023. After a round in which everything was accepted, the draft model has not run the last drafted
token. Instead of a special case, every round starts with a pass over *two* tokens, the one before the pending token
and the pending token, which rewrites a slot with what it already holds (or fills the missing one): shapes stay fixed
and nothing is ever missing. After rounds without a draft that pass is as much wider (`Plan.behind`).

A draft model may know fewer tokens than the target: its folder then holds `draft_vocab.safetensors` with the
`token_ids` of its rows; one more row stands for all other tokens, which it can read and not draft.

Cost: K steps of the small model, and a second prompt pass and cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from selfspec.cache import KVCache, kv_bytes_per_slot
from selfspec.cache.storage import slots_for
from selfspec.drafters.base import Draft, Seen
from selfspec.drafters.stretch import Stretch
from selfspec.errors import UserError
from selfspec.target import Target, load_target
from selfspec.target.stack import spread

if TYPE_CHECKING:
    from selfspec.decoding.drafting import Drafting
    from selfspec.decoding.rows import Rows
    from selfspec.decoding.tree_drafting import Growing
    from selfspec.lookahead import Plan


VOCABULARY = "draft_vocab.safetensors"


@dataclass
class Options:
    """model: conf/target name, local folder, hub id, or (from Python) a `Target`."""

    model: Any


class Independent:
    """Drafts from `model`, a `Target` with the same tokenizer as the one it drafts for, or with some of its tokens."""

    name = "independent"
    max_drafted: int | None = None

    def __init__(self, target: Target, model: Target, token_ids_N: Tensor | None = None) -> None:
        """token_ids_N: which tokens the model's rows stand for; None: the target's own vocabulary."""
        if token_ids_N is None:
            check_same_tokenizer(target, model)
        self.target = target
        self.model = model
        self._token_ids_N = token_ids_N
        if token_ids_N is not None:
            self._place_V = places(token_ids_N, target.vocab_size)

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
        hidden_BTM = self._embed(torch.cat([token_ids_BT, seen.token_ids_BT], 1))
        self.model.run_layers(hidden_BTM, 0, self.model.num_layers, pass_)

    def propose(self, rows: Rows, drafting: Drafting) -> Draft:
        for step in drafting:
            stretch = _pending(rows, drafting.plan) if step == 0 else Stretch(rows, slice(step, step + 1))
            drafting.draw(self._logits(self._run(rows, stretch)[:, -1:])[:, 0])
        return drafting.draft()

    def propose_tree(self, rows: Rows, growing: Growing) -> Draft:
        for level in growing:
            if level == 0:
                hidden_BnM = self._run(rows, _pending(rows, growing.plan))[:, -1:]
            else:
                hidden_BnM = self._run(rows, Stretch(rows, growing.nodes, growing))
            growing.grow(self._logits(hidden_BnM))
        return growing.draft()

    def _run(self, rows: Rows, stretch: Stretch) -> Tensor:
        hidden_BTM = self._embed(stretch.token_ids_BT)
        return self.model.run_layers(hidden_BTM, 0, self.model.num_layers, stretch.open(_cache_of(rows)))

    def _embed(self, token_ids_BT: Tensor) -> Tensor:
        return self.model.embed(token_ids_BT if self._token_ids_N is None else self._place_V[token_ids_BT])

    def _logits(self, hidden_BTM: Tensor) -> Tensor:
        logits_BTN = self.model.head(hidden_BTM)
        if self._token_ids_N is None:
            return logits_BTN
        return spread(logits_BTN[..., : len(self._token_ids_N)], self._token_ids_N, self.target.vocab_size)


def places(token_ids_N: Tensor, vocab_size: int) -> Tensor:
    """`[V]`: the row of each token, the last one for all that have none."""
    place_V = torch.full((vocab_size,), len(token_ids_N), dtype=torch.int64, device=token_ids_N.device)
    place_V[token_ids_N] = torch.arange(len(token_ids_N), device=token_ids_N.device)
    return place_V


def _pending(rows: Rows, plan: Plan) -> Stretch:
    """The pending token, and before it what the model may not have run yet."""
    return Stretch(rows, slice(-1 - plan.behind, 1))


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
    model, token_ids_N = options.model, None
    if not isinstance(model, Target):
        token_ids_N = read_token_ids(model, target)
        dtype, device = str(target.dtype).removeprefix("torch."), str(target.device)
        model = load_target(model, dtype=dtype, device=device, with_tokenizer=token_ids_N is None)
    if token_ids_N is not None and model.vocab_size != len(token_ids_N) + 1:
        raise UserError(
            f"The draft model {options.model} has {model.vocab_size} rows, and {VOCABULARY} beside it names "
            f"{len(token_ids_N)} tokens: there must be one row more than tokens."
        )
    return Independent(target, model, token_ids_N)


def read_token_ids(model: Any, target: Target) -> Tensor | None:
    """What a draft model's rows stand for, where its folder says so. UserError when that was for another target."""
    path = Path(str(model)).expanduser() / VOCABULARY
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt", device=str(target.device)) as file:
            token_ids_N, made_for = file.get_tensor("token_ids"), (file.metadata() or {}).get("target")
    except (SafetensorError, OSError) as error:
        raise UserError(f"Cannot read the draft vocabulary {path}: {error}.") from error
    if made_for != target.fingerprint:
        raise UserError(
            f"The draft model {model} was trained for the target with fingerprint {made_for}; {target.name} has "
            f"{target.fingerprint}. Load the target it was trained for, or train a draft for this one."
        )
    return token_ids_N
