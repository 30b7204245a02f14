"""Samples decoded with Medusa's and Hydra's heads follow p: χ² on tokens 1, 2 and 3, both rules that keep p by it
(coupled acceptance keeps every token, which is tested with the drafters).

False-alarm rate: over the choice of seed, a right decoder fails any test of this module with probability at most 1 in
1000 (Bonferroni). Seeds are fixed. What the test must be able to see: acceptance that is lossy, and says so.
"""

from __future__ import annotations

import itertools

import pytest
from chi_square import sequence_p_value
from head_drafts import random_heads
from tiny_game import CASES, DEPTH, PROMPTS, exact_p, target

from selfspec import decode
from selfspec.drafters.hydra import Hydra
from selfspec.drafters.medusa import Medusa

DRAFTERS = {"medusa": Medusa, "hydra": Hydra}
GRID = [
    (kind, rule, *what)
    for kind, rule in itertools.product(DRAFTERS, ("rejection", "block"))
    for what in (("top_k", "none", 5), ("everything", "independent", None))
]
FALSE_ALARM = 1e-3 / len(GRID)
SAMPLES = 1024


def sampled(kind: str, rule: str, case: str, prompt: str, d_vocab: int | None):
    heads, token_ids = random_heads(kind, target(), num_heads=3, d_vocab=d_vocab)
    drafter = DRAFTERS[kind](target(), heads, token_ids)
    options = dict(sampling=CASES[case].sampling, processors=CASES[case].processors, acceptance=rule, lookahead=3)
    options |= dict(max_new_tokens=DEPTH, ignore_eos=True, max_batch_rows=SAMPLES)
    return decode(target(), drafter, [PROMPTS[prompt]] * SAMPLES, **options)


@pytest.mark.parametrize("kind, rule, case, prompt, d_vocab", GRID)
def test_samples_follow_p(kind, rule, case, prompt, d_vocab):
    outputs = sampled(kind, rule, case, prompt, d_vocab)
    tokens = [tuple(output.token_ids) for output in outputs]
    assert sequence_p_value(tokens, exact_p(prompt, case)) > FALSE_ALARM
    accepted = sum(record.num_accepted for output in outputs for record in output.rounds)
    assert 0.05 < accepted / (SAMPLES * DEPTH) < 0.95, "drafts stand and fall"


@pytest.mark.parametrize("kind", DRAFTERS)
def test_typical_acceptance_does_not_and_says_so(kind):
    outputs = sampled(kind, "typical", "temperature", "none", None)
    assert all(output.lossy for output in outputs)
    assert sequence_p_value([tuple(o.token_ids) for o in outputs], exact_p("none", "temperature")) < FALSE_ALARM / 1000
