"""The oracle: what a policy would reach that knew, before each round, how many drafts would be accepted.

Computed from the recorded rounds of a long fixed lookahead and from what rounds of each K cost. A round that accepted m
drafts committed m+1 tokens; where all its drafts stood, the next round's belong to the same run of n tokens, since a
policy may begin a round anywhere in it. Knowing the runs, one would make each by the cheapest rounds whose drafts all
stand: rounds of s_1, s_2, ... tokens, Σ s = n, at cost(s−1) each (dynamic programming over n). Nothing is drafted in
vain, so no policy over the same drafts and costs is faster; more than the recorded K in one round is beyond what was
seen, so the bound is one for policies with that K as their most, and of chains: a tree verifies several drafts per
position. Inside a run the target's own token behind a round is taken for one that could have been drafted.

It is exact for drafts that depend on the text alone; for those that depend on where a round began it is an estimate.
Costs are the measured ones: the mean time of a round of that fixed lookahead in the same run (no draft: of AR), K in
between on a line. So is the share of the bound that a policy reaches: of decoding, prefill apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from selfspec.errors import UserError
from selfspec.records import PromptRecord, RoundRecord


def oracle_tokens_per_s(answers: Sequence[Sequence[RoundRecord]], cost_s: Sequence[float]) -> float:
    """Decoding tokens per second. answers: the rounds of each answer, in order. cost_s[k]: seconds of a round with k
    drafts, k = 0 to the K of the recorded rounds.

    Raises UserError when a cost is missing or not positive, or without rounds.
    """
    rounds = [entry for answer in answers for entry in answer]
    if not rounds:
        raise UserError("The oracle needs recorded rounds: measure a run with a fixed lookahead first.")
    longest = max(entry.num_drafted for entry in rounds)
    if len(cost_s) <= longest or not all(cost > 0 for cost in cost_s):
        raise UserError(
            f"The oracle needs the cost of rounds with 0 to {longest} drafts, all above 0 s; given: {list(cost_s)}."
        )
    runs = [num_tokens for answer in answers for num_tokens in runs_of(answer)]
    least_s = cheapest(cost_s, max(runs))
    return sum(runs) / sum(least_s[num_tokens] for num_tokens in runs)


def runs_of(answer: Sequence[RoundRecord]) -> list[int]:
    """Tokens of each run of rounds: it goes on while a round's drafts, at least one, all stand."""
    runs = list[int]()
    goes_on = False
    for entry in answer:
        if goes_on:
            runs[-1] += entry.num_emitted
        else:
            runs.append(entry.num_emitted)
        goes_on = 0 < entry.num_drafted == entry.num_accepted
    return runs


def cheapest(cost_s: Sequence[float], most: int) -> list[float]:
    """The least time to commit n tokens that are all known to be accepted, n = 0 to `most`."""
    least_s = [0.0]
    for n in range(1, most + 1):
        least_s.append(min(least_s[n - size] + cost_s[size - 1] for size in range(1, min(n, len(cost_s)) + 1)))
    return least_s


def share_of_oracle(tokens_per_s: float, answers: Sequence[Sequence[RoundRecord]], cost_s: Sequence[float]) -> float:
    """How much of the bound a policy reached, 0 to 1 (a little above where costs were measured with noise)."""
    return tokens_per_s / oracle_tokens_per_s(answers, cost_s)


def round_costs_s(baseline: Sequence[PromptRecord], by_k: Mapping[int, Sequence[PromptRecord]]) -> list[float]:
    """Seconds of a round with k drafts, k = 0 to the longest: of AR, of each fixed lookahead, lines in between.

    Raises UserError without a fixed lookahead, or for records without rounds.
    """
    if not by_k:
        raise UserError("The oracle needs a drafter with a fixed lookahead in the run: its rounds show what stands.")
    known = {0: mean_round_s(baseline), **{k: mean_round_s(records) for k, records in by_k.items()}}
    costs = []
    for k in range(max(known) + 1):
        below, above = max(j for j in known if j <= k), min(j for j in known if j >= k)
        share = (k - below) / (above - below) if above > below else 0.0
        costs.append(known[below] + share * (known[above] - known[below]))
    return costs


def mean_round_s(records: Sequence[PromptRecord]) -> float:
    """Decoding seconds per round, with what happens between rounds."""
    num_rounds = sum(len(record.rounds) for record in records)
    if num_rounds == 0:
        raise UserError("The oracle needs recorded rounds: these results hold none.")
    return sum(record.decode_s for record in records) / num_rounds


def decode_rate(records: Sequence[PromptRecord]) -> float:
    """Tokens per second of decoding, all records together."""
    return sum(len(record.token_ids) for record in records) / sum(record.decode_s for record in records)
