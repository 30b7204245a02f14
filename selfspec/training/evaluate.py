"""What a draft is judged by: not its loss, but how much of the target's own text it would have got accepted.

At temperature 0 every accepted draft is the target's own token, so the draft's context is the target's text, and
running rounds over the agreements of known greedy text is exact, not a simulation. Terms are those of the reports: τ
counts emitted tokens per verify pass, bonus included; α is Σ_v min(p, q), here at temperature 1 over the kept target
tokens, a lower bound (`selfspec.training.losses.acceptance`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Validation:
    """Sums over held-out text; merge batches with `+=`, read with `summary`."""

    lookahead: int
    alpha_sum: float = 0.0
    agree_sum: int = 0
    count: int = 0
    rounds: int = 0
    emitted: int = 0
    tested: list[int] = field(default_factory=list)  # by draft position
    accepted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tested = self.tested or [0] * self.lookahead
        self.accepted = self.accepted or [0] * self.lookahead

    def add_positions(self, alpha: Sequence[float], agree: Sequence[bool]) -> None:
        """First-position quality on any text: one α and one argmax agreement per answer token."""
        self.alpha_sum += sum(alpha)
        self.agree_sum += sum(agree)
        self.count += len(alpha)

    def add_greedy_text(self, agree: Sequence[bool]) -> None:
        """Rounds over one greedy answer: `agree[t]` says whether the draft would have proposed token t."""
        self.add_greedy_starts([agree[t : t + self.lookahead] for t in range(len(agree))])

    def add_greedy_starts(self, agree: Sequence[Sequence[bool]]) -> None:
        """As `add_greedy_text` for drafts that depend on where the round began: `agree[t][j]` says whether a round that
        begins at token t would have proposed token t+j, given that it proposed those before it.
        """
        at = 0
        while at < len(agree):
            accepted = 0
            for position, same in enumerate(agree[at][: self.lookahead]):
                self.tested[position] += 1
                if not same:
                    break
                self.accepted[position] += 1
                accepted += 1
            emitted = min(accepted + 1, len(agree) - at)  # no bonus token behind the end of the answer
            self.rounds += 1
            self.emitted += emitted
            at += emitted

    def summary(self) -> dict[str, Any]:
        by_position = [a / t if t else None for a, t in zip(self.accepted, self.tested, strict=True)]
        return {
            "alpha": self.alpha_sum / max(1, self.count),
            "greedy_agreement": self.agree_sum / max(1, self.count),
            "greedy_tau": self.emitted / max(1, self.rounds),
            "greedy_acceptance_by_position": by_position,
            "lookahead": self.lookahead,
            "answer_tokens": self.count,
        }
