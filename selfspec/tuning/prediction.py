"""How fast every candidate of a grid should be, predicted from a few measured costs, so that few have to be run.

Of each variant (`selfspec.tuning.grid`) two chains are run, the shortest and the longest of its grid, and its
largest tree. From them, with tau and acceptance as in `selfspec.measure.cost_model`:

    a_i           the chance that draft i is accepted, given all before; a draft that was not made counts as refused
    draft_s(K)    a line through the two chains; other_s(K) too (acceptance, commit, what a round's clocks missed)
    verify_s(K)   between the two chains along v(width), the target's own pass by width; beyond in proportion to it
    tree          a_d from accuracies by rank (`chances_by_depth`); a level of n nodes costs a draft step times v(n);
                  each phase is then scaled by what the largest tree really took
    tokens/s      Σ n_p / Σ (prefill_s + rounds(n_p) round_s) over the lengths n_p of the answers, where
                  rounds(n) = 1 + Σ_j P(j tokens in a round) rounds(n − j): the last round of an answer is cut short
    policy        the best chain that it may choose, or no draft: what it would reach if it knew; for a dynamic tree the
                  best static one of its size and depth

Left out: that acceptance depends on where a round began, and what a policy gains by telling rounds apart.
No torch: the numbers come from run directories (`RoundCost.of`) and `selfspec.tuning.costs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from selfspec.lookahead.tree_shape import TreeShape, chances_by_depth
from selfspec.measure.cost_model import expected_tau
from selfspec.records import PromptRecord
from selfspec.tuning.grid import Candidate


@dataclass(frozen=True)
class RoundCost:
    """Means per round, in seconds. `other_s` is all of the decode clock that is neither draft nor verify."""

    draft_s: float
    verify_s: float
    other_s: float

    @classmethod
    def of(cls, records: Sequence[PromptRecord]) -> RoundCost:
        rounds = [entry for record in records for entry in record.rounds]
        draft_s = sum(entry.draft_s for entry in rounds)
        verify_s = sum(entry.verify_s for entry in rounds)
        other_s = max(0.0, sum(record.decode_s for record in records) - draft_s - verify_s)
        return cls(draft_s / len(rounds), verify_s / len(rounds), other_s / len(rounds))

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.other_s


@dataclass(frozen=True)
class Curve:
    """v(width): the target's pass over so many positions, over its pass over one. Measured at some widths, a line
    between them; what reads cheaper than a narrower pass is noise.
    """

    ratio_by_width: Mapping[int, float]

    def __call__(self, width: float) -> float:
        widths = sorted(self.ratio_by_width)
        ratios = np.maximum.accumulate([self.ratio_by_width[w] for w in widths])
        assert width <= widths[-1], "the widths that are measured cover the grid"
        return float(np.interp(width, widths, ratios))


@dataclass(frozen=True)
class Known:
    """What the measured rounds of one variant say. acceptance[i]: of draft i+1, given all before,
    of its longest chain.
    """

    acceptance: Sequence[float]
    prefill_s: float  # per prompt
    shortest: RoundCost
    longest: RoundCost
    tree: tuple[TreeShape, RoundCost] | None = None
    accuracies: Sequence[Sequence[float]] | None = None


@dataclass(frozen=True)
class Reference:
    """The same rounds without a draft: their cost, the prompts' prefill, and how long the answers are, in tokens."""

    round_s: float
    prefill_s: float
    lengths: Sequence[int]

    @property
    def tokens_per_s(self) -> float:
        return tokens_per_s([], self.round_s, self.prefill_s, self.lengths)


def acceptance_of(records: Sequence[PromptRecord]) -> list[float]:
    """Entry i: of the rounds whose first i drafts were accepted, the share that accepted draft i+1; one that was not
    made counts as refused.

    Over all rounds, the last of an answer too: a round is the likelier to be cut short the more it accepted, and to
    leave those out would read too low in short answers. What was accepted is recorded untrimmed.
    """
    accepted = [entry.num_accepted for record in records for entry in record.rounds]
    longest = max((entry.num_drafted for record in records for entry in record.rounds), default=0)
    return conditional([sum(count > i for count in accepted) / len(accepted) for i in range(longest)])


def conditional(joint: Sequence[float]) -> list[float]:
    """The chances that the first 1, 2, ... drafts are all accepted -> the chance of each, given all before."""
    before = [1.0, *joint[:-1]]
    return [now / earlier if earlier > 0 else 0.0 for now, earlier in zip(joint, before, strict=True)]


# ---- the prediction


@dataclass(frozen=True)
class Predicted:
    """c, v: draft step and everything else of a round, in autoregressive rounds."""

    candidate: Candidate
    tokens_per_s: float
    tau: float
    round_s: float
    c: float
    v: float


def predict(candidate: Candidate, known: Known, reference: Reference, v: Curve) -> Predicted:
    """Tokens per second of this candidate over the reference's prompts, prefill included."""
    if candidate.shape is not None:
        acceptance, cost = tree_acceptance(candidate.shape, known.accuracies or []), tree_cost(candidate, known, v)
    elif candidate.lookahead["kind"] == "fixed":
        acceptance, cost = list(known.acceptance[: candidate.most]), chain_cost(candidate.most, candidate, known, v)
    else:
        return best_choice(candidate, known, reference, v)
    return _predicted(candidate, acceptance, cost, known, reference)


def best_choice(candidate: Candidate, known: Known, reference: Reference, v: Curve) -> Predicted:
    """A policy: the best of the chains up to its longest, or none."""
    nothing = _predicted(candidate, [], RoundCost(0.0, reference.round_s, 0.0), known, reference)
    chains = [
        _predicted(candidate, list(known.acceptance[:k]), chain_cost(k, candidate, known, v), known, reference)
        for k in range(candidate.variant.num_drafted[0], candidate.most + 1)
    ]
    return max([nothing, *chains], key=lambda one: one.tokens_per_s)


def _predicted(
    candidate: Candidate, acceptance: Sequence[float], cost: RoundCost, known: Known, reference: Reference
) -> Predicted:
    return Predicted(
        candidate,
        tokens_per_s(acceptance, cost.total_s, known.prefill_s, reference.lengths),
        expected_tau(acceptance),
        cost.total_s,
        c=cost.draft_s / max(1, len(acceptance)) / reference.round_s,
        v=(cost.verify_s + cost.other_s) / reference.round_s,
    )


def chain_cost(num_drafted: int, candidate: Candidate, known: Known, v: Curve) -> RoundCost:
    """A round of K drafts, from those of the shortest and the longest chain."""
    first, last = candidate.variant.num_drafted[0], candidate.variant.num_drafted[-1]
    share = (num_drafted - first) / (last - first) if last > first else 0.0
    one, other = known.shortest, known.longest
    return RoundCost(
        max(0.0, one.draft_s + share * (other.draft_s - one.draft_s)),
        _verify_s(num_drafted + 1, first + 1, last + 1, known, v),
        max(0.0, one.other_s + share * (other.other_s - one.other_s)),
    )


def _verify_s(width: int, first: int, last: int, known: Known, v: Curve) -> float:
    """Between the two measured widths along v, by width where v is flat; beyond them in proportion to it."""
    one_s, other_s = known.shortest.verify_s, known.longest.verify_s
    if width > last or first == last:
        return other_s * v(width) / v(last)
    rise = v(last) - v(first)
    share = (v(width) - v(first)) / rise if rise > 0 else (width - first) / (last - first)
    return one_s + (other_s - one_s) * share


def tree_cost(candidate: Candidate, known: Known, v: Curve) -> RoundCost:
    """A round of this tree: by formula, then each phase scaled by what the variant's measured tree took."""
    assert candidate.shape is not None and known.tree is not None, "a variant with trees has one of them measured"
    shape, took = known.tree
    wanted, same = (_tree_formula(one, candidate, known, v) for one in (candidate.shape, shape))
    scaled = [
        phase * real / formula if formula > 0 else real
        for phase, real, formula in zip(_phases(wanted), _phases(took), _phases(same), strict=True)
    ]
    return RoundCost(*scaled)


def _tree_formula(shape: TreeShape, candidate: Candidate, known: Known, v: Curve) -> RoundCost:
    first, last = candidate.variant.num_drafted[0], candidate.variant.num_drafted[-1]
    chain = chain_cost(shape.depth, candidate, known, v)
    step_s = max(0.0, known.longest.draft_s - known.shortest.draft_s) / (last - first) if last > first else 0.0
    inner = [end - begin for begin, end, _ in shape.levels if end > begin]
    wider_s = sum(step_s * (v(nodes) - 1) for nodes in inner)
    return RoundCost(chain.draft_s + wider_s, _verify_s(shape.num_nodes, first + 1, last + 1, known, v), chain.other_s)


def _phases(cost: RoundCost) -> tuple[float, float, float]:
    return cost.draft_s, cost.verify_s, cost.other_s


def tree_acceptance(shape: TreeShape, accuracies: Sequence[Sequence[float]]) -> list[float]:
    """Per depth: the chance that one of its nodes is accepted, given that one of the depth before was."""
    return [min(1.0, chance) for chance in conditional(chances_by_depth(shape, accuracies))]


def expected_rounds(acceptance: Sequence[float], most: int) -> list[float]:
    """Entry n: the mean number of rounds that n tokens take, n = 0 to `most`."""
    reached = [1.0, *np.cumprod(acceptance).tolist(), 0.0]
    emits = [(j, reached[j - 1] - reached[j]) for j in range(1, len(reached))]
    rounds = [0.0]
    for n in range(1, most + 1):
        rounds.append(1.0 + sum(chance * rounds[max(0, n - j)] for j, chance in emits))
    return rounds


def tokens_per_s(acceptance: Sequence[float], round_s: float, prefill_s: float, lengths: Sequence[int]) -> float:
    """All tokens over all seconds, as `tokens_per_s` of a summary."""
    rounds = expected_rounds(acceptance, max(lengths))
    return sum(lengths) / sum(prefill_s + rounds[n] * round_s for n in lengths)


def promising(predicted: Sequence[Predicted], top: int) -> list[Predicted]:
    """The `top` fastest, and the fastest of every drafter; fastest first."""
    ordered = sorted(predicted, key=lambda one: -one.tokens_per_s)
    best: dict[str, Predicted] = {}
    for one in ordered:
        best.setdefault(one.candidate.variant.drafter, one)
    kept = {one.candidate.label for one in [*ordered[:top], *best.values()]}
    return [one for one in ordered if one.candidate.label in kept]
