"""What each policy decides, against its formula worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from selfspec import UserError
from selfspec.config import conf_names, load_conf
from selfspec.lookahead import POLICIES, Plan, RoundOutcome, Stopping, build_lookahead
from selfspec.lookahead.bandit import Bandit
from selfspec.lookahead.confidence import AdaptiveThreshold, Confidence
from selfspec.lookahead.entropy import Entropy
from selfspec.lookahead.expected_gain import ExpectedGain
from selfspec.lookahead.heuristic import Heuristic

CPU = torch.device("cpu")


def outcome(plan, drafted, accepted, round_s=0.01):
    drafted, accepted = ([x] if isinstance(x, int) else x for x in (drafted, accepted))
    return RoundOutcome(plan, drafted, accepted, [a + 1 for a in accepted], 0.0, 0.0, round_s)


def test_every_policy_has_a_config_and_builds_from_it():
    presets = {name for name in conf_names("lookahead") if load_conf("lookahead", name)["kind"] != name}
    assert presets == {"k1", "k2"} and set(conf_names("lookahead")) - presets == set(POLICIES)
    for name in conf_names("lookahead"):
        policy = build_lookahead(name)
        assert type(policy) is POLICIES[load_conf("lookahead", name)["kind"]]
        assert 0 <= policy.choose().num_drafted <= policy.max_drafted


def test_the_heuristic_grows_by_two_after_full_acceptance_of_all_rows_and_shrinks_by_one_otherwise():
    policy = Heuristic(initial=3, max_drafted=6)
    for drafted, accepted, expected in [([3, 3], [3, 3], 5), ([5, 5], [5, 4], 4), ([4], [4], 6), ([6], [6], 6)]:
        policy.observe(outcome(policy.choose(), drafted, accepted))
        assert policy.choose() == Plan(expected)
    for _ in range(9):
        policy.observe(outcome(policy.choose(), 2, 0))
    assert policy.choose() == Plan(1)
    policy.observe(outcome(policy.choose(), [0], [0]))  # nothing was tested (an n-gram without a match)
    assert policy.choose() == Plan(1)


@pytest.mark.parametrize("sampled", [True, False], ids=["with_q", "greedy_without_q"])
def test_confidence_looks_at_the_drawn_token(sampled):
    policy = Confidence(threshold=0.5)
    policy.start(CPU)
    q_BV = torch.tensor([[0.6, 0.3, 0.1], [0.6, 0.3, 0.1]])
    logits_BV = q_BV.log() + 7
    goes_on = policy.goes_on(logits_BV, q_BV if sampled else None, torch.tensor([0, 1]), 0)
    assert goes_on.tolist() == [True, False]


def test_entropy_bounds_acceptance():
    policy = Entropy(threshold=0.5, gamma=0.2)
    policy.start(CPU)
    q_BV = torch.tensor([[0.9, 0.1, 0.0], [1 / 3, 1 / 3, 1 / 3]])
    bounds = [1 - math.sqrt(0.2 * h) for h in (-(0.9 * math.log(0.9) + 0.1 * math.log(0.1)), math.log(3))]
    assert bounds[0] > 0.5 and bounds[1] > 0.5  # both go on at 0.5 ...
    assert policy.goes_on(q_BV.log(), q_BV, torch.tensor([0, 0]), 0).tolist() == [True, True]
    stricter = Entropy(threshold=sum(bounds) / 2, gamma=0.2)  # ... one of them between their bounds
    stricter.start(CPU)
    assert stricter.goes_on(q_BV.log(), None, torch.tensor([0, 0]), 0).tolist() == [True, False]


def test_the_adaptive_threshold_follows_the_published_update_and_keeps_its_address():
    policy = AdaptiveThreshold(threshold=0.6, max_drafted=4)
    policy.start(CPU)
    address = policy._threshold._on_device.data_ptr()
    rate, threshold = 0.9, 0.6
    for drafted, accepted in [(4, 4), (4, 0), (3, 3), (2, 2), (1, 1), (1, 1), (1, 1), (4, 4)]:
        policy.observe(outcome(policy.choose(), drafted, accepted))
        rate = 0.5 * rate + 0.5 * accepted / drafted
        wanted = threshold + 0.01 if rate < 0.9 else threshold if drafted == 4 else threshold - 0.01
        threshold = 0.9 * threshold + 0.1 * wanted
        assert policy._threshold.value == pytest.approx(threshold)
        assert float(policy._threshold._on_device) == pytest.approx(threshold)
    assert policy._threshold._on_device.data_ptr() == address
    policy.start(CPU)  # a further call
    assert policy._threshold._on_device.data_ptr() == address and policy._threshold.value == pytest.approx(threshold)


def play(policy, alpha, draft_s, verify_s, num_rounds, seed=0):
    """Rounds of a machine with known costs and acceptance; returns tokens per second and the last plans."""
    generator = torch.Generator().manual_seed(seed)
    tokens, seconds, plans = 0, 0.0, []
    for _ in range(num_rounds):
        plan = policy.choose()
        k = plan.num_drafted
        stands = (torch.rand(k, generator=generator) < alpha).long()
        accepted = int(stands.cumprod(0).sum()) if k else 0
        round_s = 1.0 + k * draft_s + (verify_s * k if k else 0)
        policy.observe(outcome(plan, k, accepted, round_s))
        tokens, seconds = tokens + accepted + 1, seconds + round_s
        plans.append(k)
    return tokens / seconds, plans


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("draft_s", [0.02, 0.1, 0.4])
def test_expected_gain_comes_close_to_the_best_fixed_k_and_never_far_below_no_draft(alpha, draft_s):
    rates = [sum(alpha**i for i in range(k + 1)) / (1 + k * (draft_s + 0.02)) for k in range(9)]
    reached, plans = play(ExpectedGain(max_drafted=8), alpha, draft_s, 0.02, 2000)
    assert reached >= 0.97 * max(rates), (plans[-50:], rates)
    assert reached >= 0.97 * rates[0]


def test_expected_gain_notices_when_the_text_changes():
    policy = ExpectedGain(max_drafted=8)
    _, early = play(policy, 0.05, 0.2, 0.02, 500)
    assert max(early[-20:]) <= 2
    _, late = play(policy, 0.97, 0.2, 0.02, 2000)
    assert sorted(late[-100:])[50] >= 6
    _, last = play(policy, 0.0, 0.2, 0.02, 1500)
    assert sorted(last[-100:])[50] == 0


def test_the_bandit_finds_the_best_arm():
    policy = Bandit(num_drafted=[0, 1, 4, 8])
    _, plans = play(policy, 0.6, 0.2, 0.02, 2000)
    rates = {k: sum(0.6**i for i in range(k + 1)) / (1 + k * 0.22) for k in (0, 1, 4, 8)}
    assert max(rates, key=rates.get) == 1 and rates[1] > 1.06 * max(rates[k] for k in (0, 4, 8))
    assert plans[-500:].count(1) > 300
    assert set(plans) == {0, 1, 4, 8}


def test_the_bandit_plays_every_exit_with_every_length():
    policy, seen = Bandit(num_drafted=[0, 2, 3], exit_layers=[1, 2]), set()
    for _ in range(20):
        plan = policy.choose()
        seen.add(plan)
        policy.observe(outcome(plan, plan.num_drafted, 0))
    assert seen == {Plan(0), Plan(2, 1), Plan(2, 2), Plan(3, 1), Plan(3, 2)}


def test_a_plan_after_rounds_without_a_draft_knows_what_is_missing():
    assert Plan(3).after(0, 512) == Plan(3)
    assert [Plan(3).after(n, 512).behind for n in (1, 2, 3, 4, 5, 300)] == [1, 2, 4, 4, 8, 256]
    assert [Plan(3).after(n, 128).behind for n in (64, 65)] == [64, 126], "no pass is longer than a row"
    assert Plan(0).after(9, 512) == Plan(0), "nothing is missed where nothing is drafted"


@pytest.mark.parametrize(
    "given, message",
    [
        ({"kind": "heuristic", "initial": 0}, "1 <= initial <= max_drafted"),
        ({"kind": "heuristic", "initial": 20, "max_drafted": 8}, "1 <= initial <= max_drafted"),
        ({"kind": "confidence", "threshold": 1.5}, "threshold=1.5 is not possible: allowed is a number from 0 to 1"),
        ({"kind": "confidence", "threshold": True}, "threshold=True is not possible"),
        ({"kind": "confidence", "max_drafted": 0}, "max_drafted=0 is not possible"),
        ({"kind": "adaptive_threshold", "step": -1}, "step=-1 is not possible"),
        ({"kind": "entropy", "gamma": 0}, "gamma=0 is not possible"),
        ({"kind": "expected_gain", "half_life": 0}, "half_life=0 is not possible"),
        ({"kind": "expected_gain", "max_drafted": 2.5}, "max_drafted=2.5 is not possible"),
        ({"kind": "bandit", "num_drafted": []}, "give whole numbers"),
        ({"kind": "bandit", "num_drafted": [0]}, "never drafts"),
        ({"kind": "bandit", "num_drafted": [-1, 2]}, "give whole numbers"),
        ({"kind": "bandit", "exit_layers": [1.5]}, r"exit_layers=\[1.5\] is not possible"),
        ({"kind": "bandit", "exit_layers": "12"}, "exit_layers=.* is not possible"),
        ({"kind": "heuristic", "initial": 2.5}, "allowed are whole numbers, 1 <= initial"),
        ({"kind": "heuristic", "initial": 1, "max_drafted": 2.5}, "max_drafted=2.5 is not possible"),
        ({"kind": ["fixed"]}, r"No lookahead of kind \['fixed'\]"),
        ({"kind": "nonsense"}, "No lookahead of kind 'nonsense'"),
        ({"kind": "confidence", "treshold": 0.5}, "Bad options for lookahead 'confidence'"),
    ],
)
def test_impossible_options_are_refused(given, message):
    with pytest.raises(UserError, match=message):
        build_lookahead(given)


def test_only_policies_that_stop_are_asked_to():
    stopping = {name for name in POLICIES if isinstance(build_lookahead(name), Stopping)}
    assert stopping == {"confidence", "adaptive_threshold", "entropy"}
    assert all(isinstance(build_lookahead(name).choose(), Plan) for name in POLICIES)
