"""The bound every lookahead policy is compared with."""

from __future__ import annotations

import itertools

import pytest

from selfspec import UserError
from selfspec.lookahead.expected_gain import ExpectedGain
from selfspec.lookahead.plan import RoundOutcome
from selfspec.records import RoundRecord
from selfspec.report.oracle import cheapest, oracle_tokens_per_s, share_of_oracle


def answers_of(*answers, num_drafted=4):
    return [[RoundRecord(num_drafted, m, m + 1, 0.0, 0.0, 0.0) for m in accepted] for accepted in answers]


def test_the_cheapest_rounds_are_found():
    cost_s = [1.0, 1.3, 1.9, 2.0, 3.5]
    for n in range(1, 6):
        every = [c for k in range(1, n + 1) for c in itertools.product(range(1, 6), repeat=k) if sum(c) == n]
        assert cheapest(cost_s, n)[n] == pytest.approx(min(sum(cost_s[s - 1] for s in sizes) for sizes in every))


def test_it_is_worked_by_hand():
    """Drafting is dear: two tokens by two plain rounds (2.0 s) and not by one with a draft (2.5 s)."""
    assert oracle_tokens_per_s(answers_of([1], [0], num_drafted=1), [1.0, 2.5]) == pytest.approx(3 / 3.0)
    assert oracle_tokens_per_s(answers_of([1], [0], num_drafted=1), [1.0, 1.5]) == pytest.approx(3 / 2.5)


def test_rounds_may_begin_elsewhere_where_all_drafts_stand():
    """K = 4 makes 5 tokens a round; of these costs 4 at a time are the best, which no split of 5 by itself reaches."""
    cost_s = [1.0, 1.2, 1.4, 1.6, 5.0]
    always_right = oracle_tokens_per_s(answers_of([4] * 8), cost_s)
    assert always_right == pytest.approx(4 / 1.6)
    with_one_refused = oracle_tokens_per_s(answers_of([4, 2, 0]), cost_s)
    assert with_one_refused == pytest.approx(9 / (2 * 1.6 + 1.0))  # 5+3 = 4+4, and 1
    assert oracle_tokens_per_s(answers_of([4], [2, 0]), cost_s) < with_one_refused, "a run ends with its answer"
    none_drafted = [[RoundRecord(0, 0, 1, 0.0, 0.0, 0.0)] * 4]
    assert oracle_tokens_per_s(none_drafted, cost_s) == 1.0, "where nothing was drafted there is nothing to accept"


@pytest.mark.parametrize("cost_s", [[1.0, 1.2, 1.4, 1.6, 1.8], [1.0, 1.2, 1.4, 1.6, 5.0], [1.0, 1.1, 2.0, 3.0, 4.0]])
@pytest.mark.parametrize("fixed", [0, 1, 2, 3, 4])
def test_no_policy_over_the_same_drafts_and_costs_is_faster(fixed, cost_s):
    text = [1, 1, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 0, 1] * 20  # whether the draft at a position is right

    def play(policy):
        at, seconds, records = 0, 0.0, []
        while at < len(text) - 6:
            k = policy(at)
            m = next((i for i in range(k) if not text[at + i]), k)
            records.append(RoundRecord(k, m, m + 1, 0.0, 0.0, cost_s[k]))
            at, seconds = at + m + 1, seconds + cost_s[k]
        return at / seconds, records

    _, recorded = play(lambda at: 4)
    bound = oracle_tokens_per_s([recorded], cost_s)
    rate, _ = play(lambda at: fixed)
    assert rate <= bound * 1.02  # they end at different tokens
    adaptive = ExpectedGain(max_drafted=4)

    def gain(at):
        gain.plan = adaptive.choose()
        return gain.plan.num_drafted

    at, seconds = 0, 0.0
    while at < len(text) - 6:
        k = gain(at)
        m = next((i for i in range(k) if not text[at + i]), k)
        adaptive.observe(RoundOutcome(gain.plan, [k], [m], [m + 1], 0.0, 0.0, cost_s[k]))
        at, seconds = at + m + 1, seconds + cost_s[k]
    assert share_of_oracle(at / seconds, [recorded], cost_s) <= 1.02


@pytest.mark.parametrize("cost_s", [[1.0], [1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 1.0, 1.0, 1.0]])
def test_missing_costs_are_refused(cost_s):
    with pytest.raises(UserError, match="cost of rounds with 0 to 4 drafts"):
        oracle_tokens_per_s(answers_of([1]), cost_s)
    with pytest.raises(UserError, match="needs recorded rounds"):
        oracle_tokens_per_s([], cost_s)
