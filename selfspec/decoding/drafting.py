"""Drawing a chain of drafts: the one place where a drafter's logits become tokens, and where a draft may end early.

A policy with `goes_on` (`selfspec.lookahead.Stopping`) is asked after each drawn token whether the row goes on. What
was drawn is verified in any case, so the stop may depend on the draft and its q without touching the output's
distribution. Rows that stopped still go through the remaining steps (shapes are fixed per round), and what they draw
there does not count; where the host may look (eagerly, on the CPU) the draft ends as soon as no row goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from selfspec.decoding.rows import Rows
from selfspec.decoding.sampler import Sampler
from selfspec.drafters.base import Draft
from selfspec.lookahead import Plan, Stopping
from selfspec.sampling import faults


class Drafting:
    """One draft phase. Iterate over it for the steps; each step draws once; `draft` at the end."""

    def __init__(
        self, rows: Rows, plan: Plan, sampler: Sampler, stopping: Stopping | None = None, may_look: bool = False
    ) -> None:
        """may_look: the host may read the device after each token, to end the draft early."""
        self.plan, self.may_look = plan, may_look
        self.num_steps = 0
        self._rows, self._sampler, self._stopping = rows, sampler, stopping
        self._q: list[Tensor] = []
        self._top: list[Tensor] = []  # the largest logit of each step, where no q is made
        self._goes_on_B = rows.active_B
        self._num_drafted_B = torch.zeros_like(rows.lengths_B)

    @property
    def seed(self) -> int | Tensor:
        return self._sampler.seed

    def at_most(self, num_drafted: int | None) -> Drafting:
        """The same phase with a shorter plan, for a drafter that is part of another."""
        fewer = self.plan.num_drafted if num_drafted is None else min(num_drafted, self.plan.num_drafted)
        plan = replace(self.plan, num_drafted=fewer)
        return Drafting(self._rows, plan, self._sampler, self._stopping, self.may_look)

    def __iter__(self) -> Iterator[int]:
        for step in range(self.plan.num_drafted):
            if step > 0 and self.may_look and self._stopping is not None and not bool(self._goes_on_B.any()):
                return
            yield step

    def draw(self, logits_BV: Tensor) -> Tensor:
        """The drafter's own logits (−inf: cannot be drafted) -> the token `[B]`, also behind the row's last one."""
        drawn = self._sampler.draw(self._rows, self.num_steps, logits_BV)
        if drawn.q_BV is not None:
            self._q.append(drawn.q_BV)
        if drawn.top_B is not None:
            self._top.append(drawn.top_B)
        if self._stopping is not None:
            self._num_drafted_B = self._num_drafted_B + self._goes_on_B
            self._goes_on_B = self._goes_on_B & self._stopping.goes_on(
                drawn.logits_BV, drawn.q_BV, drawn.token_B, self.num_steps
            )
        self.num_steps += 1
        return drawn.token_B

    def draft(self, hidden_BTM: Tensor | None = None, first_layer: int = 0) -> Draft:
        """All that was drawn. hidden: `[B, K+1, M]` at the input of `first_layer`, where layers below it have run."""
        drafted_B = self._num_drafted_B
        if self._stopping is None:
            drafted_B = torch.full_like(self._rows.lengths_B, self.num_steps)
        q_BKV = torch.stack(self._q, 1) if self._q else None
        self._q.clear()  # it would be in memory twice
        broken_BK = faults.broken(torch.stack(self._top, 1)) if self._top else None
        drafted_BK = self._rows.window(1, self.num_steps)
        return Draft(drafted_BK, drafted_B, q_BKV, hidden_BTM, first_layer, broken_BK=broken_BK)
