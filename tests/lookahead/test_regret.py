"""What `expected_gain` loses by not knowing: against the best fixed K of the same rounds, on a clock of our own.

Costs, acceptance, the machine's speed and its noise are set; what counts is expected tokens over true time, so that
only choices matter and not the luck of the coins. Deterministic: seeds, no real time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from selfspec.lookahead import Plan, RoundOutcome
from selfspec.lookahead.expected_gain import ExpectedGain
from selfspec.lookahead.round_costs import RoundCosts, rising

ROUNDS, MOST, SEEDS = 600, 5, range(5)
Acceptance = Callable[[int, int], float]  # round, position -> chance that the draft stands, given all before it

COSTS: dict[str, Callable[[int], float]] = {  # of a round with K drafts, in autoregressive steps
    "head": lambda k: 1.0 if k == 0 else 1.04 + 0.13 * k,
    "all_at_once": lambda k: 1.0 if k == 0 else 1.07 + 0.03 * k,
    "dear_exit": lambda k: 1.0 if k == 0 else 1.25 + 0.25 * k,
    "lookup": lambda k: 1.0 + 0.035 * k,
    "stairs": lambda k: 1.0 if k == 0 else 1.0 + 0.06 * k + 0.35 * (k // 4),
}
ACCEPTANCE: dict[str, Acceptance] = {
    "0": lambda t, i: 0.0,
    ".35": lambda t, i: 0.35,
    ".6": lambda t, i: 0.6,
    ".85": lambda t, i: 0.85,
    "falling": lambda t, i: max(0.5 - 0.08 * i, 0.05),
    "rising": lambda t, i: min(0.3 + 0.15 * i, 0.9),  # copies
    "drifting": lambda t, i: 0.45 + 0.35 * math.sin(2 * math.pi * t / 400),
    "by_prompt": lambda t, i: (0.65, 0.2, 0.45)[t // 30 % 3],
}


def level_s(t: int) -> float:
    """Seconds of a step: the machine's speed wanders, prompts differ, and contexts grow."""
    return 0.013 * (1 + 0.15 * math.sin(t / 60)) * (1 + 0.05 * math.sin(999 * (t // 40))) * (1 + 0.001 * (t % 40))


def expected(acceptance: Acceptance, t: int, num_drafted: int) -> float:
    """Tokens of a round."""
    emitted, path = 1.0, 1.0
    for i in range(num_drafted):
        path *= acceptance(t, i)
        emitted += path
    return emitted


def fixed_rates(cost: Callable[[int], float], acceptance: Acceptance) -> list[float]:
    """Tokens per second of every fixed K, over these rounds."""
    tokens = [sum(expected(acceptance, t, k) for t in range(ROUNDS)) for k in range(MOST + 1)]
    return [tokens[k] / sum(cost(k) * level_s(t) for t in range(ROUNDS)) for k in range(MOST + 1)]


def play(policy, cost: Callable[[int], float], acceptance: Acceptance, seed: int) -> float:
    """Expected tokens per second of true time."""
    rng, ran, tokens, seconds = random.Random(seed), set(), 0.0, 0.0
    for t in range(ROUNDS):
        k = policy.choose().num_drafted
        accepted = next((i for i in range(k) if rng.random() >= acceptance(t, i)), k)
        noise = rng.lognormvariate(0, 0.05) * (3 if rng.random() < 0.02 else 1) * (1 if k in ran else 5)
        ran.add(k)
        true_s = cost(k) * level_s(t)
        policy.observe(RoundOutcome(Plan(k), [k], [accepted], [accepted + 1], 0.0, 0.0, true_s * noise))
        tokens, seconds = tokens + expected(acceptance, t, k), seconds + true_s
    return tokens / seconds


@pytest.mark.parametrize("cost", COSTS)
def test_expected_gain_is_within_three_percent_of_the_best_fixed_k_and_five_of_no_draft(cost):
    for name, acceptance in ACCEPTANCE.items():
        rates = fixed_rates(COSTS[cost], acceptance)
        played = [play(ExpectedGain(max_drafted=MOST), COSTS[cost], acceptance, seed) for seed in SEEDS]
        reached = sum(played) / len(SEEDS) / max(rates)
        assert reached > 0.97, f"{cost}, acceptance {name}: {reached:.3f} of the best fixed K"
        assert min(played) > 0.95 * rates[0], f"{cost}, acceptance {name}: {played} with {rates[0]} of no draft"


class NeverChanges(ExpectedGain):
    """Drafts all it may, always."""

    def choose(self) -> Plan:
        return Plan(self.max_drafted)


def test_the_simulation_tells_a_bad_policy_from_a_good_one():
    """Negative control: a policy that does not choose is far off wherever the longest draft is not the best."""
    for name in ("0", ".35"):
        rates = fixed_rates(COSTS["head"], ACCEPTANCE[name])
        assert play(NeverChanges(max_drafted=MOST), COSTS["head"], ACCEPTANCE[name], 0) < 0.9 * max(rates)


def test_a_draft_that_ended_early_counts_as_one_that_did_not_stand():
    """A lookup that finds a match in one round of seven is not worth 0.3 of a round, although all its copies stand."""
    policy, rng, drafting = ExpectedGain(max_drafted=1), random.Random(0), 0
    for _ in range(600):
        k = policy.choose().num_drafted
        found = k if rng.random() < 0.15 else 0
        policy.observe(RoundOutcome(Plan(k), [found], [found], [found + 1], 0.0, 0.0, 0.01 * (1 + 0.3 * k)))
        drafting += k
    assert drafting < 120


def test_costs_do_not_drift_while_one_k_goes_on_and_the_machine_gets_slower():
    costs = RoundCosts(3, keep=0.99)
    for k in [3, 3, 3, 0, 0, 0, 0] * 3:
        costs.observe(k, 0.01 * (1 + 0.2 * k))
    for t in range(400):
        costs.observe(3, 0.016 * (1 + t / 200))
    costs.observe(0, 0.01 * 3)  # one that is compared with rounds of K = 3 that are as slow
    costs.observe(0, 0.01 * 3)
    assert costs.cost(0) / costs.cost(3) == pytest.approx(1 / 1.6, rel=0.2)


def test_a_round_with_more_drafts_never_costs_less():
    assert rising([1.0, 0.8, 1.2, 1.1, 1.1], [1, 3, 1, 1, 2]) == pytest.approx([0.85, 0.85, 1.125, 1.125, 1.125])
    assert rising([1.0, 2.0, 3.0], [1, 1, 1]) == [1.0, 2.0, 3.0]
