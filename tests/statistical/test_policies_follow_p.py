"""A draft that ends when it doubts itself: samples still follow p, and would not if the doubted token were withdrawn.

False-alarm rate: the FAMILY tests together at most 1 in 1000 over the choice of seed (Bonferroni); seeds are fixed.
"""

from __future__ import annotations

import itertools

import pytest
from chi_square import sequence_p_value
from tiny_game import exact_p, sample

from selfspec.decoding.drafting import Drafting
from selfspec.lookahead import POLICIES

POLICY = {
    "confidence": dict(threshold=0.25, max_drafted=3),
    "entropy": dict(threshold=0.45, max_drafted=3),
    "heuristic": dict(initial=2, max_drafted=3),
}
GRID = list(itertools.product(POLICY, ("rejection", "block"), ("early_exit", "independent")))
FALSE_ALARM = 1e-3 / len(GRID)


@pytest.mark.parametrize("policy, rule, drafter", GRID)
def test_samples_follow_p(policy, rule, drafter):
    lookahead = POLICIES[policy](**POLICY[policy])
    tokens, outputs = sample(drafter, "top_p", 2048, acceptance=rule, lookahead=lookahead)
    assert sequence_p_value(tokens, exact_p(drafter, "top_p")) > FALSE_ALARM
    assert len({record.num_drafted for output in outputs for record in output.rounds}) > 1, "it never stopped"


def test_withdrawing_the_doubted_token_is_seen(monkeypatch):
    """Negative control: whether a token is verified must not depend on which token it is."""
    original = Drafting.draft

    def withdrawn(self, *args, **kwargs):
        draft = original(self, *args, **kwargs)
        draft.num_drafted_B = (draft.num_drafted_B - (~self._goes_on_B).long()).clamp(min=0)
        return draft

    monkeypatch.setattr(Drafting, "draft", withdrawn)
    lookahead = POLICIES["confidence"](threshold=0.25, max_drafted=3)
    tokens, _ = sample("early_exit", "top_p", 2048, acceptance="rejection", lookahead=lookahead)
    assert sequence_p_value(tokens, exact_p("early_exit", "top_p")) < FALSE_ALARM
