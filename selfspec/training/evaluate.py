"""What a draft is judged by: not its loss, but how much of the target's own text it would have got accepted.

At temperature 0 every accepted draft is the target's own token, so the draft's context is the target's text, and
running rounds over the agreements of known greedy text is exact, not a simulation. Terms are those of the reports: τ
counts emitted tokens per verify pass, bonus included; α is Σ_v min(p, q), here at temperature 1 over the kept target
tokens, a lower bound (`selfspec.training.losses.acceptance`), and by draft position along the text that is known. From
it `sampled_tau` = 1 + Σ_k α_1 ... α_k, as if positions were independent: an estimate, where greedy τ is a count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Validation:
    """Sums over held-out text, read with `summary`."""

    lookahead: int
    agree_sum: int = 0
    count: int = 0
    rounds: int = 0
    emitted: int = 0
    alpha_sums: list[float] = field(default_factory=list)  # by draft position, as all below
    alpha_counts: list[int] = field(default_factory=list)
    tested: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    also: dict[str, Any] = field(default_factory=dict)  # what else this kind of draft is judged by

    def __post_init__(self) -> None:
        self.alpha_sums = self.alpha_sums or [0.0] * self.lookahead
        self.alpha_counts = self.alpha_counts or [0] * self.lookahead
        self.tested = self.tested or [0] * self.lookahead
        self.accepted = self.accepted or [0] * self.lookahead

    def add_positions(self, alpha: Sequence[float], agree: Sequence[bool]) -> None:
        """First-position quality on any text: one α and one argmax agreement per answer token."""
        self.add_alpha(0, alpha)
        self.agree_sum += sum(agree)
        self.count += len(alpha)

    def add_alpha(self, position: int, alpha: Sequence[float]) -> None:
        """α at a later position of the draft, given the text up to there."""
        self.alpha_sums[position] += sum(alpha)
        self.alpha_counts[position] += len(alpha)

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
        """`expected_tau` is what drafts are chosen by: counted on greedy text, estimated where there is none."""
        alphas = [
            total / count if count else None for total, count in zip(self.alpha_sums, self.alpha_counts, strict=True)
        ]
        by_position = [a / t if t else None for a, t in zip(self.accepted, self.tested, strict=True)]
        greedy_tau, sampled_tau = self.emitted / max(1, self.rounds), _tau(alphas)
        return {
            "alpha": alphas[0] or 0.0,
            "alpha_by_position": alphas,
            "sampled_tau": sampled_tau,
            "greedy_agreement": self.agree_sum / max(1, self.count),
            "greedy_tau": greedy_tau,
            "greedy_acceptance_by_position": by_position,
            "expected_tau": greedy_tau if self.rounds else sampled_tau,
            "lookahead": self.lookahead,
            "answer_tokens": self.count,
            **self.also,
        }


def _tau(alphas: Sequence[float | None]) -> float:
    tau, reached = 1.0, 1.0
    for alpha in alphas:
        if alpha is None:
            break
        reached *= alpha
        tau += reached
    return tau
