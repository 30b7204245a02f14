"""The one protocol every way of drafting follows, and what it hands to the round.

A drafter holds weights and options; what it keeps per sequence (a cache of its own, say) lives in `rows.draft_state`,
so one drafter can serve several runs. A new drafter is one file with an `Options` dataclass and a `build` function,
one conf/drafter file and one line in `selfspec.drafters.registry`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from selfspec.decoding.drafting import Drafting
    from selfspec.decoding.rows import Rows
    from selfspec.decoding.tree_layout import TreeLayout
    from selfspec.sampling import Rule
    from selfspec.sampling.acceptance.tree import Tree


@dataclass
class Draft:
    """What one draft phase proposes. K is the same for all rows; `num_drafted_B` says how many of them count."""

    tokens_BK: Tensor  # int64
    num_drafted_B: Tensor  # int64, <= K; K itself may be less than was planned
    q_BKV: Tensor | None = None  # the distribution each token was really drawn from; None: one-hot
    hidden_BTM: Tensor | None = None  # [B, K+1, M] at the input of `first_layer`, pending and drafted tokens
    first_layer: int = 0  # layers [0, first_layer) have run on all K+1 tokens
    tree: Tree | None = None  # then tokens_BK are its nodes without the root, and K+1 above is their number with it
    layout: TreeLayout | None = None  # where the tree's nodes stand
    broken_BK: Tensor | None = None  # bool, drawn without q from logits that hold NaN or +inf (a tree says so itself)
    source_B: Tensor | None = None  # int64, which part of a drafter of several made each row's draft; None: 0


@dataclass
class Seen:
    """Tokens that the target has run for good: a chunk of a prompt, or what a round has verified and committed.

    T is fixed per shape of round; `last_B` says how far it counts. Behind it lie rejected drafts, whose slots the next
    round overwrites.
    """

    rows: slice  # one row of a prompt, or all
    positions_BT: Tensor  # int64; −1: padding, or a row that takes no part
    token_ids_BT: Tensor
    next_ids_BT: Tensor  # the token after each position, up to the pending one
    last_B: Tensor  # int64, index into T of the last position that stays, the one before the pending token
    extent: int  # slots that a pass over these positions may read
    features_BTF: Tensor | None = None  # hidden states entering the drafter's `feature_layers`, side by side

    def keep(self, state_BX: Tensor, new_BTX: Tensor) -> None:
        """Write what was computed at the last position that stays into a drafter's state, one entry per row."""
        at_B11 = self.last_B.view(-1, 1, 1).expand(-1, 1, new_BTX.shape[-1])
        takes_part_B1 = self.positions_BT[:, :1] >= 0
        state_BX[self.rows].copy_(torch.where(takes_part_B1, new_BTX.gather(1, at_B11)[:, 0], state_BX[self.rows]))


class Drafter(Protocol):
    """Proposes tokens for all rows at once."""

    name: str
    max_drafted: int | None  # the longest draft it can make; None: any

    def start(self, rows: Rows) -> None:
        """Allocate what this drafter keeps for these rows (`rows.draft_state`). Its `reset(row, prompt_ids, request)`,
        if it has one, is called when a request comes in; `reads_prompt = False` says that it keeps nothing of prompts.
        """

    def prefill(self, rows: Rows, seen: Seen) -> None:
        """The target has run a chunk of a row's prompt; bring the drafter's own state to the same point."""

    def propose(self, rows: Rows, drafting: Drafting) -> Draft:
        """Tokens drawn with `drafting`, or written behind the committed ones with `rows.propose`."""


@runtime_checkable
class ReadsFeatures(Protocol):
    """A drafter that reads the target's hidden states: handed to `prefill`, and after each round to `refresh`."""

    feature_layers: tuple[int, ...]  # those entering these layers; L: leaving the last one, before the final norm

    def refresh(self, rows: Rows, seen: Seen) -> None:
        """A round is committed: replace what the draft made up by what the target has computed. Fixed shapes, no host
        reads; rows whose positions are −1 keep their state.
        """


@runtime_checkable
class Limited(Protocol):
    """A drafter that cannot serve sequences of any length: asked before a run directory or a cache is made."""

    def check_capacity(self, num_tokens: int) -> None:
        """UserError unless `num_tokens` (prompt and output) are possible. Drafts past them are never kept."""


@runtime_checkable
class Sized(Protocol):
    """A drafter that takes memory of its own: asked before a cache is made."""

    def draft_bytes(self, num_rows: int, capacity: int) -> tuple[int, int]:
        """Bytes of its weights, and of what `start` allocates for so many rows of so many tokens."""


@runtime_checkable
class Foretold(Protocol):
    """A drafter that must be told the target's own output first: it is decoded beforehand, off the clock."""

    def check(self, rule: Rule) -> None:
        """UserError for an acceptance rule under which that output cannot be known."""

    def learn(self, sequences: Sequence[list[int]]) -> None:
        """Prompt and autoregressive output of every request of a call, in order."""


class NoDraft:
    """Autoregressive decoding: the same loop, sampler and clock, nothing drafted. The baseline of every comparison."""

    name = "none"
    max_drafted: int | None = 0

    def start(self, rows: Rows) -> None:
        rows.draft_state = None

    def prefill(self, rows: Rows, seen: Seen) -> None:
        pass

    def propose(self, rows: Rows, drafting: Drafting) -> Draft:
        nothing = torch.zeros(rows.num_rows, 0, dtype=torch.int64, device=rows.device)
        return Draft(nothing, torch.zeros_like(rows.lengths_B))


def feature_layers_of(drafter: Drafter) -> tuple[int, ...]:
    return drafter.feature_layers if isinstance(drafter, ReadsFeatures) else ()
