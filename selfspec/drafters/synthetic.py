"""Scripted drafts: each is the target's own next token with a set probability. For studying speed, never a result.

What speculation is worth depends on how often drafts stand and on what they cost. Here both are set by hand:
`accept_rate` is α, the chance that a draft is right, and `cost_layers` how many of the target's layers a draft step
runs (with the head, one token at a time, verified from there on: an early exit's cost; 0 is a lookup). Everything else
is the real engine, and the output is exact as with any drafter. Records and tables mark such a method as synthetic.

The drafter has to know the target's tokens beforehand, so `Decoder` first decodes every prompt autoregressively, off
the clock, and `learn` is told what came out. Where a draft is to be wrong is noise keyed by the absolute position: the
same positions are wrong for every K and any number of rows, and each tested draft is an independent coin. That needs
an output that does not depend on what is drafted: temperature 0, or `acceptance="coupled"` above it. Other rules draw
anew after each round, so their tokens cannot be known; they are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfspec.cache.storage import slots_for
from selfspec.drafters.base import Draft, Seen
from selfspec.errors import UserError
from selfspec.sampling import Rule
from selfspec.sampling.noise import uniforms
from selfspec.target import Target

if TYPE_CHECKING:
    from selfspec.decoding.drafting import Drafting
    from selfspec.decoding.rows import Rows

STREAM_SYNTHETIC = 255  # of the noise; used by nothing else
KNOWN_OUTPUT = ("greedy", "coupled")  # rules whose output is the autoregressive one, token for token


@dataclass
class Options:
    """accept_rate: chance that a draft is right, 0..1. cost_layers: layers that a draft step runs, 0..L−1."""

    accept_rate: float
    cost_layers: int = 0


@dataclass
class Told:
    """Per row: the prompt and the target's own output `[B, S]`, and its length. `sequences`: those of all requests."""

    tokens_BS: Tensor
    ends_B: Tensor
    sequences: list[list[int]]

    def reset(self, row: int, prompt_ids: Sequence[int], request: int) -> None:
        """Look up the request that comes in; one small copy to the device per prompt."""
        known = self.sequences[request] if request < len(self.sequences) else []
        if known[: len(prompt_ids)] != list(prompt_ids):
            raise UserError(
                "The synthetic drafter was not told the target's own tokens for this prompt. Run it through "
                "selfspec.decode or a Decoder, which find them first."
            )
        self.tokens_BS[row, : len(known)].copy_(torch.tensor(known, dtype=torch.int64))
        self.ends_B[row].fill_(len(known))


class Synthetic:
    """Drafts the target's own next tokens, each with probability `accept_rate`, else a wrong one."""

    name = "synthetic"
    synthetic = True
    max_drafted: int | None = None

    def __init__(self, target: Target, accept_rate: float, cost_layers: int = 0) -> None:
        if not 0 <= accept_rate <= 1:
            raise UserError(f"accept_rate={accept_rate} is not possible: it is a probability, 0 to 1.")
        if not 0 <= cost_layers < target.num_layers:
            raise UserError(
                f"cost_layers={cost_layers} is not possible with {target.name}, which has {target.num_layers} layers: "
                f"allowed are 0 (a lookup) to {target.num_layers - 1}."
            )
        self.target = target
        self.accept_rate = accept_rate
        self.cost_layers = cost_layers
        self.sequences: list[list[int]] = []

    def check(self, rule: Rule) -> None:
        """UserError for an acceptance rule under which the target's tokens cannot be known beforehand."""
        if rule.name not in KNOWN_OUTPUT:
            raise UserError(
                f"The synthetic drafter must know the target's tokens beforehand; with acceptance={rule.name!r} they "
                "depend on the drafts. Use temperature=0, or acceptance='coupled'."
            )

    def learn(self, sequences: Sequence[list[int]]) -> None:
        """Prompt and autoregressive output of every request of a call, in order."""
        self.sequences[:] = sequences  # in place: the rows hold it

    def draft_bytes(self, num_rows: int, capacity: int) -> tuple[int, int]:
        return 0, 8 * num_rows * (slots_for(capacity) + 1)

    def start(self, rows: Rows) -> None:
        rows.draft_state = Told(torch.zeros_like(rows.tokens_BS), torch.zeros_like(rows.lengths_B), self.sequences)

    def prefill(self, rows: Rows, seen: Seen) -> None:
        pass

    def propose(self, rows: Rows, drafting: Drafting) -> Draft:
        told, num_drafted = _told(rows), drafting.plan.num_drafted
        last = told.tokens_BS.shape[1] - 1
        positions_BK = rows.lengths_B[:, None] + 1 + torch.arange(num_drafted, device=rows.device)
        right_BK = told.tokens_BS.gather(1, positions_BK.clamp(max=last))
        wrong_BK = (right_BK + 1) % self.target.vocab_size
        requests_N = rows.request_B[:, None].expand_as(positions_BK).reshape(-1)
        coins_N1 = uniforms(drafting.seed, requests_N, positions_BK.reshape(-1), STREAM_SYNTHETIC, 1)
        drafted_BK = torch.where(coins_N1.view_as(right_BK) < self.accept_rate, right_BK, wrong_BK)
        rows.propose(0, drafted_BK)
        num_known_B = (told.ends_B - 1 - rows.lengths_B).clamp(min=0, max=num_drafted)
        draft = Draft(drafted_BK, torch.where(rows.active_B, num_known_B, 0))
        if self.cost_layers:
            draft.hidden_BTM, draft.first_layer = self._run_layers(rows, num_drafted), self.cost_layers
        return draft

    def _run_layers(self, rows: Rows, num_drafted: int) -> Tensor:
        """What an early exit at `cost_layers` would run: its layers on all K+1 tokens, one at a time, and K heads."""
        hidden = []
        for step in range(num_drafted + 1):
            hidden_B1M = self.target.embed(rows.window(step, 1))
            hidden.append(self.target.run_layers(hidden_B1M, 0, self.cost_layers, rows.open(step, 1)))
            if step < num_drafted:
                self.target.head(hidden[-1])
        return torch.cat(hidden, 1)


def _told(rows: Rows) -> Told:
    assert isinstance(rows.draft_state, Told), "start() was not called for these rows"
    return rows.draft_state


def build(target: Target, options: Options) -> Synthetic:
    return Synthetic(target, options.accept_rate, options.cost_layers)
