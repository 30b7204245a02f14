"""Copy where the text repeats itself, ask a learned draft where it does not.

Per row and round: if the last tokens occurred before and the match is long enough, what followed then is drafted
(`ngram`: free, and long copies often stand); else the learned draft is asked, for as many tokens as pay for it. Which
of the two made a draft is recorded per round (`RoundRecord.source`: 0 the learned draft, 1 a copy).

The learned draft must be able to catch up with text that it did not draft: one that reads the target's hidden states
(eagle3, mtp, medusa, hydra, exit_adapter: they are shown what was committed), or one that keeps nothing (early_exit).

On the CPU one look at the match decides which of the two is run at all. Where rows differ, and in a captured round,
both are, and each row takes its own. Cost beside the learned draft's: the n-gram search.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from selfspec.drafters.base import Draft, Drafter, ReadsFeatures, Seen
from selfspec.drafters.clasp import Clasp
from selfspec.drafters.early_exit import EarlyExit
from selfspec.drafters.ngram import NGram, copied_lengths
from selfspec.errors import UserError
from selfspec.target import Target

if TYPE_CHECKING:
    from selfspec.decoding.drafting import Drafting
    from selfspec.decoding.rows import Rows

LEARNED, COPIED = 0, 1


@dataclass
class Options:
    """learned: the learned draft, a mapping with `kind` and its options. learned_drafted: the most it drafts (None:
    the lookahead's K); copies may take all of K. max_match, min_match, num_per_match: of the copies, as in `ngram`.
    """

    learned: dict[str, Any] = field(default_factory=dict)
    learned_drafted: int | None = None
    max_match: int = 4
    min_match: int = 2
    num_per_match: float | None = None


class Hybrid:
    """An n-gram match if there is one, else the learned draft."""

    name = "hybrid"
    max_drafted: int | None = None
    sources = ("learned", "ngram")

    def __init__(
        self,
        target: Target,
        learned: Drafter,
        learned_drafted: int | None = None,
        max_match: int = 4,
        min_match: int = 2,
        num_per_match: float | None = None,
    ) -> None:
        if not isinstance(learned, ReadsFeatures | EarlyExit) or isinstance(learned, Clasp):
            raise UserError(
                f"A hybrid cannot be made with {learned.name!r}: it keeps a state of its own, and would miss what was "
                "copied. Allowed: drafts that read the target's hidden states (eagle3, mtp, medusa, hydra, "
                "exit_adapter), and early_exit."
            )
        most = [n for n in (learned_drafted, learned.max_drafted) if n is not None]
        if learned_drafted is not None and learned_drafted < 1:
            raise UserError(f"learned_drafted={learned_drafted} is not possible: allowed is 1 or more, or null.")
        self.target, self.learned = target, learned
        self.learned_drafted = min(most) if most else None
        self.ngram = NGram(max_match, min_match, num_per_match)
        self.feature_layers = learned.feature_layers if isinstance(learned, ReadsFeatures) else ()

    def draft_bytes(self, num_rows: int, capacity: int) -> tuple[int, int]:
        measure = getattr(self.learned, "draft_bytes", None)
        return measure(num_rows, capacity) if measure is not None else (0, 0)

    def start(self, rows: Rows) -> None:
        self.learned.start(rows)

    def prefill(self, rows: Rows, seen: Seen) -> None:
        self.learned.prefill(rows, seen)

    def refresh(self, rows: Rows, seen: Seen) -> None:
        """As after a piece of prompt: the learned draft has not seen what was copied."""
        self.learned.prefill(rows, seen)

    def propose(self, rows: Rows, drafting: Drafting) -> Draft:
        copied = self.ngram.copy(rows, drafting.plan.num_drafted)
        if drafting.may_look:
            longest, fewest = copied_lengths(rows, copied)
            if fewest > 0 or drafting.plan.num_drafted == 0:
                tokens_BK = copied.tokens_BK[:, :longest]
                return Draft(tokens_BK, copied.num_drafted_B, source_B=torch.ones_like(copied.num_drafted_B))
            if longest == 0:
                return self.learned.propose(rows, drafting.at_most(self.learned_drafted))
        learned = self.learned.propose(rows, drafting.at_most(self.learned_drafted))
        return choose(rows, copied, learned)


def choose(rows: Rows, copied: Draft, learned: Draft) -> Draft:
    """Each row's own: the copy where there is one. All layers are verified, since the rows differ in what has run."""
    copies_B1 = copied.num_drafted_B[:, None] > 0
    missing = copied.tokens_BK.shape[1] - learned.tokens_BK.shape[1]
    tokens_BK = torch.where(copies_B1, copied.tokens_BK, F.pad(learned.tokens_BK, (0, missing)))
    q_BKV: Tensor | None = None
    if learned.q_BKV is not None:
        q_BKV = F.pad(learned.q_BKV, (0, 0, 0, missing))
        certain_BKV = torch.zeros_like(q_BKV).scatter_(-1, tokens_BK[..., None], 1.0)
        q_BKV = torch.where(copies_B1[..., None], certain_BKV, q_BKV)
    broken_BK: Tensor | None = None
    if learned.broken_BK is not None:
        broken_BK = F.pad(learned.broken_BK, (0, missing)) & ~copies_B1
    rows.propose(0, tokens_BK)
    num_drafted_B = torch.where(copies_B1[:, 0], copied.num_drafted_B, learned.num_drafted_B)
    return Draft(tokens_BK, num_drafted_B, q_BKV, broken_BK=broken_BK, source_B=copies_B1[:, 0].long())


def build(target: Target, options: Options) -> Hybrid:
    from selfspec.drafters.registry import build_drafter

    learned = dict(options.learned)
    if not learned:
        raise UserError("The drafter 'hybrid' needs `learned`: a mapping with `kind` and the options of that draft.")
    copies = options.max_match, options.min_match, options.num_per_match
    return Hybrid(target, build_drafter(learned, target), options.learned_drafted, *copies)
