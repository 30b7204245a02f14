"""Drafters crafted for tests of what must hold whatever is drafted."""

from __future__ import annotations

import torch

from selfspec.drafters.base import Draft


class AlwaysWrong:
    """Drafts token 0 unless token 0 would be right: nothing is ever accepted."""

    name, max_drafted = "always_wrong", None

    def start(self, rows):
        pass

    def prefill(self, rows, seen):
        pass

    def propose(self, rows, drafting):
        num_drafted = drafting.plan.num_drafted
        tokens = torch.zeros(rows.num_rows, num_drafted, dtype=torch.int64)
        rows.propose(0, tokens)
        return Draft(tokens, torch.full_like(rows.lengths_B, num_drafted))
