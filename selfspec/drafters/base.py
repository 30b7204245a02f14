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

    from selfspec.decoding.rows import Rows
    from selfspec.decoding.sampler import Sampler
    from selfspec.sampling import Rule


@dataclass
class Draft:
    """What one draft phase proposes. K is the same for all rows; `num_drafted_B` says how many of them count."""

    tokens_BK: Tensor  # int64
    num_drafted_B: Tensor  # int64, <= K
    q_BKV: Tensor | None = None  # the distribution each token was really drawn from; None: one-hot
    hidden_BTM: Tensor | None = None  # [B, K+1, M] at the input of `first_layer`, pending and drafted tokens
    first_layer: int = 0  # layers [0, first_layer) have run on all K+1 tokens


class Drafter(Protocol):
    """Proposes tokens for all rows at once."""

    name: str
    max_drafted: int | None  # the longest draft it can make; None: any

    def start(self, rows: Rows) -> None:
        """Allocate what this drafter keeps for these rows (`rows.draft_state`)."""

    def prefill(self, rows: Rows, row: int, start: int, end: int) -> None:
        """The target has run tokens [start, end) of `row`; bring the drafter's own state to the same point."""

    def propose(self, rows: Rows, num_drafted: int, sampler: Sampler) -> Draft:
        """Up to `num_drafted` tokens per row, also written behind the committed ones with `rows.propose`."""


@runtime_checkable
class Limited(Protocol):
    """A drafter that cannot serve sequences of any length: asked before a run directory or a cache is made."""

    def check_capacity(self, num_tokens: int) -> None:
        """UserError unless `num_tokens` (prompt, output and one draft) are possible."""


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

    def prefill(self, rows: Rows, row: int, start: int, end: int) -> None:
        pass

    def propose(self, rows: Rows, num_drafted: int, sampler: Sampler) -> Draft:
        nothing = torch.zeros(rows.num_rows, 0, dtype=torch.int64, device=rows.device)
        return Draft(nothing, torch.zeros_like(rows.lengths_B))


def stack_q(q: list[Tensor | None]) -> Tensor | None:
    """Per-step q `[B, V]` -> `[B, K, V]`, or None when the draws were deterministic."""
    kept = [q_BV for q_BV in q if q_BV is not None]
    return torch.stack(kept, 1) if kept else None
