"""Policies in the real loop: whatever they decide, the output is the target's own."""

from __future__ import annotations

import copy

import pytest
from crafted_drafters import AlwaysWrong

from selfspec import Decoder, Sampling, UserError, build_drafter, decode, wrap_target
from selfspec.lookahead import POLICIES, Plan, build_lookahead
from tiny_models import prompt_ids, tiny_llama

TARGET = wrap_target(tiny_llama())
PROMPTS = [prompt_ids(length, seed=length) for length in (1, 9, 70, 5)]


DRAFTERS = {
    "early_exit": build_drafter("early_exit", TARGET, exit_layer=2),
    "independent": build_drafter("independent", TARGET, model=wrap_target(tiny_llama(seed=5, num_layers=2))),
    "independent_equal": build_drafter("independent", TARGET, model=TARGET),
    "ngram": build_drafter("ngram", TARGET),
    "always_wrong": AlwaysWrong(),
}
SAMPLED = dict(sampling=Sampling(temperature=0.9, top_p=0.95), acceptance="coupled", seed=7)


def policies(name):
    policy = build_lookahead(name)
    if name in ("confidence", "adaptive_threshold", "entropy"):
        policy = POLICIES[name](threshold=0.2, max_drafted=5)
    return policy


@pytest.mark.parametrize("drafter, max_batch_rows", [("early_exit", 1), ("independent", 3), ("ngram", 3)])
# trees: tests/decoding/test_trees.py
@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"fixed", "tree", "dynamic_tree"}))
def test_tokens_do_not_depend_on_the_policy(policy, drafter, max_batch_rows):
    for options in ({}, SAMPLED):
        options = dict(max_new_tokens=20, ignore_eos=True, **options)
        expected = [output.token_ids for output in decode(TARGET, None, PROMPTS, **options)]
        outputs = decode(
            TARGET, DRAFTERS[drafter], PROMPTS, lookahead=policies(policy), max_batch_rows=max_batch_rows, **options
        )
        assert [output.token_ids for output in outputs] == expected
        most = policies(policy).max_drafted
        assert all(record.num_drafted <= most for output in outputs for record in output.rounds)


@pytest.mark.parametrize("policy, threshold", [("confidence", 0.4), ("entropy", 0.45), ("adaptive_threshold", 0.4)])
def test_a_draft_ends_at_the_first_doubt_and_the_doubted_token_is_verified(policy, threshold, monkeypatch):
    steps = []
    drafter = build_drafter("early_exit", TARGET, exit_layer=3)
    original = TARGET.head

    def counted(hidden_BTM):
        if hidden_BTM.shape[1] == 1:
            steps.append(1)
        return original(hidden_BTM)

    monkeypatch.setattr(TARGET, "head", counted)
    lookahead = POLICIES[policy](threshold=threshold, max_drafted=6)
    (output,) = decode(TARGET, drafter, [prompt_ids(9)], max_new_tokens=40, lookahead=lookahead, ignore_eos=True)
    drafted = [record.num_drafted for record in output.rounds]
    assert sum(drafted) == len(steps), "no head beyond the last drafted token"
    assert 1 <= min(drafted) < max(drafted) <= 6


def test_rows_stop_by_themselves():
    lookahead = POLICIES["confidence"](threshold=0.4, max_drafted=5)
    outputs = decode(
        TARGET,
        DRAFTERS["early_exit"],
        PROMPTS,
        lookahead=lookahead,
        max_batch_rows=4,
        max_new_tokens=30,
        ignore_eos=True,
    )
    one_by_one = decode(
        TARGET,
        DRAFTERS["early_exit"],
        PROMPTS,
        lookahead=lookahead,
        max_batch_rows=1,
        max_new_tokens=30,
        ignore_eos=True,
    )
    records = [[(r.num_drafted, r.num_accepted) for r in output.rounds] for output in outputs]
    assert records == [[(r.num_drafted, r.num_accepted) for r in output.rounds] for output in one_by_one]
    assert len({drafted for record in records for drafted, _ in record}) > 1


class Script:
    """K from a list, over and over."""

    def __init__(self, lengths):
        self.lengths, self.max_drafted, self.rounds = lengths, max(lengths), 0

    def choose(self):
        self.rounds += 1
        return Plan(self.lengths[(self.rounds - 1) % len(self.lengths)])


@pytest.mark.parametrize("max_batch_rows", [1, 3])
def test_after_rounds_without_a_draft_an_independent_model_that_equals_the_target_still_accepts_all(max_batch_rows):
    """Its cache lacks what it did not draft; if it were not caught up, it would draft from stale keys."""
    script = Script([0, 3, 0, 0, 0, 3, 3, 0, 0, 0, 0, 0, 0, 2])
    outputs = decode(
        TARGET,
        DRAFTERS["independent_equal"],
        PROMPTS,
        lookahead=script,
        max_batch_rows=max_batch_rows,
        max_new_tokens=60,
        ignore_eos=True,
    )
    rounds = [record for output in outputs for record in output.rounds]
    assert {record.num_drafted for record in rounds} == {0, 2, 3}
    last = [output.rounds[-1] for output in outputs]  # may be cut at the length
    assert all(r.num_accepted == r.num_drafted for r in rounds if all(r is not one for one in last))


def test_the_policy_lives_on_from_call_to_call():
    policy = POLICIES["heuristic"](initial=5, max_drafted=8)
    decoder = Decoder(TARGET, AlwaysWrong(), capacity=300)
    for expected in ([5, 4, 3], [2, 1, 1]):
        (output,) = decoder.decode([prompt_ids(9)], max_new_tokens=3, lookahead=policy, ignore_eos=True)
        assert [record.num_drafted for record in output.rounds] == expected


def test_choosing_among_exits_needs_a_drafter_that_has_them():
    bandit = {"kind": "bandit", "num_drafted": [2], "exit_layers": [1, 2]}
    outputs = decode(TARGET, DRAFTERS["early_exit"], PROMPTS, lookahead=copy.deepcopy(bandit), max_new_tokens=12)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in decode(TARGET, None, PROMPTS, max_new_tokens=12)]
    with pytest.raises(UserError, match="'ngram' has one exit or none"):
        decode(TARGET, DRAFTERS["ngram"], PROMPTS, lookahead=bandit)
    with pytest.raises(UserError, match="exit_layer=4 is not possible"):
        decode(TARGET, DRAFTERS["early_exit"], PROMPTS, lookahead={**bandit, "exit_layers": [1, 4]})
