"""Prompt lookup: what followed the most recent earlier occurrence of the current suffix is likely to follow again.

The longest suffix of up to `max_match` tokens that occurred before in the row wins; among its occurrences the most
recent one (Saxena 2023; transformers takes the leftmost). The longer the match, the longer a copy stands: with
`num_per_match` a copy is at most so many times as long as its match (SuffixDecoding, Oliaro et al. 2024, arXiv
2411.04975). No model, q is one-hot. All on the device with fixed shapes: every slot's last `max_match` tokens are
compared with the row's. Worth it where output repeats input: summaries, code edits, question answering.

On the CPU one look at the match cuts the draft to what was copied: a round without a match verifies one token, not K+1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from selfspec.drafters.base import Draft, Seen
from selfspec.errors import UserError
from selfspec.target import Target

if TYPE_CHECKING:
    from selfspec.decoding.drafting import Drafting
    from selfspec.decoding.rows import Rows


MOST_PER_MATCH = 1_000_000  # more than any lookahead


@dataclass
class Options:
    """max_match, min_match: longest and shortest suffix, in tokens, that is looked up. num_per_match: tokens copied per
    token of the match, at most (None: all of the lookahead's K).
    """

    max_match: int = 3
    min_match: int = 1
    num_per_match: float | None = None


class NGram:
    """Drafts by copying from the row's own tokens."""

    name = "ngram"
    max_drafted: int | None = None

    def __init__(self, max_match: int = 3, min_match: int = 1, num_per_match: float | None = None) -> None:
        if not 1 <= min_match <= max_match:
            raise UserError(f"min_match={min_match} and max_match={max_match}: allowed is 1 <= min_match <= max_match.")
        if num_per_match is not None and not 1 <= num_per_match <= MOST_PER_MATCH:
            raise UserError(
                f"num_per_match={num_per_match} is not possible: allowed is a number from 1 to {MOST_PER_MATCH:,}, or "
                "null."
            )
        self.max_match, self.min_match, self.num_per_match = max_match, min_match, num_per_match

    def start(self, rows: Rows) -> None:
        rows.draft_state = None

    def prefill(self, rows: Rows, seen: Seen) -> None:
        pass

    def propose(self, rows: Rows, drafting: Drafting) -> Draft:
        copied = self.copy(rows, drafting.plan.num_drafted)
        if not drafting.may_look:
            return copied
        longest, _ = copied_lengths(rows, copied)
        return Draft(copied.tokens_BK[:, :longest], copied.num_drafted_B)

    def copy(self, rows: Rows, num_drafted: int) -> Draft:
        """Up to `num_drafted` tokens per row, none where there is no match."""
        tokens_BS = rows.tokens_BS
        num_slots = tokens_BS.shape[1]
        longest = min(self.max_match, num_slots)
        last_B1 = rows.lengths_B[:, None]  # index of the pending token
        slots_S = torch.arange(num_slots, device=rows.device)
        nothing_BS = F.pad(tokens_BS, (longest, 0), value=-1)  # in front of the first token, which matches nothing
        suffix_BX = nothing_BS.gather(1, last_B1 + 1 + torch.arange(longest, device=rows.device))
        before_BSX = nothing_BS.unfold(1, longest, 1)[:, :num_slots]  # the tokens in front of each slot
        alike_BSX = (before_BSX == suffix_BX[:, None]) & (before_BSX >= 0)
        match_BS = alike_BSX.flip(-1).long().cumprod(-1).sum(-1)  # how many of them are the row's last, from the end
        match_BS = torch.where((slots_S <= last_B1) & (match_BS >= self.min_match), match_BS, 0)
        best_B1 = (match_BS * num_slots + slots_S).amax(1, keepdim=True)  # the longest, then the most recent
        start_B1, match_B1 = best_B1 % num_slots, best_B1 // num_slots
        most_B1 = torch.full_like(match_B1, num_drafted)
        if self.num_per_match is not None:
            most_B1 = most_B1.minimum((match_B1 * self.num_per_match).long())
        num_drafted_B = torch.where(match_B1 > 0, torch.minimum(last_B1 + 1 - start_B1, most_B1), 0)[:, 0]
        copied_BK = start_B1 + torch.arange(num_drafted, device=rows.device)
        drafted_BK = tokens_BS.gather(1, copied_BK.clamp(max=num_slots - 1))
        rows.propose(0, drafted_BK)
        return Draft(drafted_BK, torch.where(rows.active_B, num_drafted_B, 0))


def copied_lengths(rows: Rows, copied: Draft) -> tuple[int, int]:
    """The longest and the shortest copy among rows that take part; both 0 without one. Reads the host once."""
    found, active = torch.stack([copied.num_drafted_B, rows.active_B.long()]).tolist()
    lengths = [length for length, takes_part in zip(found, active, strict=True) if takes_part]
    return max(lengths, default=0), min(lengths, default=0)


def build(target: Target, options: Options) -> NGram:
    return NGram(options.max_match, options.min_match, options.num_per_match)
