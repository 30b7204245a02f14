"""Prompt lookup: what followed the most recent earlier occurrence of the current suffix is likely to follow again.

The longest suffix of up to `max_match` tokens that occurred before in the row wins; among its occurrences the most
recent one (Saxena 2023; transformers takes the leftmost). No model, q is one-hot. All on the device with fixed
shapes: a few comparisons of the token buffer, `max_match` times. Worth it where output repeats input: summaries, code
edits, question answering.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from selfspec.drafters.base import Draft, Seen
from selfspec.errors import UserError
from selfspec.target import Target

if TYPE_CHECKING:
    from selfspec.decoding.drafting import Drafting
    from selfspec.decoding.rows import Rows


@dataclass
class Options:
    """max_match, min_match: longest and shortest suffix, in tokens, that is looked up."""

    max_match: int = 3
    min_match: int = 1


class NGram:
    """Drafts by copying from the row's own tokens."""

    name = "ngram"
    max_drafted: int | None = None

    def __init__(self, max_match: int = 3, min_match: int = 1) -> None:
        if not 1 <= min_match <= max_match:
            raise UserError(f"min_match={min_match} and max_match={max_match}: allowed is 1 <= min_match <= max_match.")
        self.max_match = max_match
        self.min_match = min_match

    def start(self, rows: Rows) -> None:
        rows.draft_state = None

    def prefill(self, rows: Rows, seen: Seen) -> None:
        pass

    def propose(self, rows: Rows, drafting: Drafting) -> Draft:
        tokens_BS, num_drafted = rows.tokens_BS, drafting.plan.num_drafted
        slots_S = torch.arange(tokens_BS.shape[1], device=rows.device)
        last_B1 = rows.lengths_B[:, None]  # index of the pending token
        follows_BS = (slots_S >= 1) & (slots_S <= last_B1)  # slot s: the match ends at s−1, so s may be drafted
        start_B1 = torch.zeros_like(last_B1)  # where the copied continuation starts; 0: no match
        longest = min(self.max_match, tokens_BS.shape[1])
        for length in range(1, longest + 1):  # grow the suffix: a longer match overwrites a shorter one
            wanted_B1 = tokens_BS.gather(1, (last_B1 - length + 1).clamp(min=0))
            earlier_BS = tokens_BS.roll(length, dims=1)  # slot s holds the token at s − length
            follows_BS = follows_BS & (earlier_BS == wanted_B1) & (slots_S >= length) & (last_B1 >= length)
            if length >= self.min_match:
                found_B1 = torch.where(follows_BS, slots_S, 0).amax(1, keepdim=True)
                start_B1 = torch.where(found_B1 > 0, found_B1, start_B1)
        copied_BK = start_B1 + torch.arange(num_drafted, device=rows.device)
        num_drafted_B = torch.where(start_B1 > 0, last_B1 + 1 - start_B1, 0).clamp(max=num_drafted)[:, 0]
        drafted_BK = tokens_BS.gather(1, copied_BK.clamp(max=tokens_BS.shape[1] - 1))
        rows.propose(0, drafted_BK)
        return Draft(drafted_BK, torch.where(rows.active_B, num_drafted_B, 0))


def build(target: Target, options: Options) -> NGram:
    return NGram(options.max_match, options.min_match)
