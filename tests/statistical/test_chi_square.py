"""The whole decoder's samples follow p: χ² on tokens 1, 2 and 3 for every transform, acceptance rule and drafter.

False-alarm rate: over the choice of seed, a right decoder fails any of the FAMILY χ² tests of this module with
probability at most 1 in 1000 (Bonferroni: each alone with 0.001 / FAMILY). The seeds are fixed, so the outcome is the
same in every run: it does not flicker. `test_negative_controls.py` holds what these tests must be able to see.

Coupled acceptance is tested by more than a distribution: its autoregressive samples by χ², and that every drafter's
samples are those, request by request.
"""

from __future__ import annotations

import itertools

import pytest
from chi_square import sequence_p_value
from tiny_game import CASES, DEPTH, DRAFTERS, EXIT, PROMPTS, ROWS, exact_p, sample, target

from selfspec import build_drafter, decode

GRID = [
    *itertools.product(CASES, ("rejection", "block"), DRAFTERS, (1, 3)),
    *itertools.product(CASES, ("rejection", "block"), ("reduced",), (3,)),
]
AR_GRID = list(itertools.product(CASES, ("rejection", "coupled")))
EOS_GRID = list(itertools.product(("rejection", "block", "coupled"), DRAFTERS, (1, 3)))
FAMILY = len(GRID) + len(AR_GRID) + len(EOS_GRID) + 2
FALSE_ALARM = 1e-3 / FAMILY
SAMPLES = {case: 1024 if CASES[case].processors else 2048 for case in CASES}  # a caller's processors are slow
EOS = 4  # likely under p, so that outputs end at every offset


@pytest.mark.parametrize("case, rule, drafter, num_drafted", GRID)
def test_samples_follow_p(case, rule, drafter, num_drafted):
    tokens, outputs = sample(drafter, case, SAMPLES[case], acceptance=rule, lookahead=num_drafted)
    assert sequence_p_value(tokens, exact_p(drafter, case)) > FALSE_ALARM
    assert not any(output.lossy for output in outputs)


@pytest.mark.parametrize("case, rule", AR_GRID)
def test_autoregressive_samples_follow_p(case, rule):
    """The baseline is a sample from p too, by the same code with nothing drafted."""
    tokens, _ = sample("none", case, SAMPLES[case], acceptance=rule)
    assert sequence_p_value(tokens, exact_p("none", case)) > FALSE_ALARM


@pytest.mark.parametrize("case, drafter, num_drafted", list(itertools.product(CASES, DRAFTERS, (1, 3))))
def test_coupled_samples_are_the_autoregressive_ones(case, drafter, num_drafted):
    options = dict(acceptance="coupled", prompt=PROMPTS["none"])
    expected, _ = sample("none", case, 192, **options)
    tokens, outputs = sample(drafter, case, 192, lookahead=num_drafted, **options)
    assert tokens == expected
    assert not any(output.lossy for output in outputs)


@pytest.mark.parametrize("rule, drafter, num_drafted", EOS_GRID)
def test_sequences_that_end_at_eos_follow_p(rule, drafter, num_drafted):
    options = dict(acceptance=rule, lookahead=num_drafted, ignore_eos=False, eos_token_ids=[EOS])
    tokens, outputs = sample(drafter, "top_k", SAMPLES["top_k"], **options)
    assert {output.finish_reason for output in outputs} == {"eos", "length"}
    assert sequence_p_value(tokens, exact_p(drafter, "top_k"), eos=EOS) > FALSE_ALARM


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_draft_that_may_propose_nothing_leaves_p_alone(rule):
    """The only token of the draft's vocabulary, the EOS, is suppressed: token 0 is proposed, as a certain draft."""
    drafter = build_drafter("early_exit", target(), exit_layer=EXIT, d_vocab=1)
    options = dict(sampling=CASES["suppressed"].sampling, acceptance=rule, max_new_tokens=DEPTH, max_batch_rows=ROWS)
    outputs = decode(target(), drafter, [PROMPTS["independent"]] * 2048, lookahead=3, **options)
    assert not any(2 in output.token_ids for output in outputs)
    tokens = [tuple(output.token_ids) for output in outputs]
    assert sequence_p_value(tokens, exact_p("independent", "suppressed")) > FALSE_ALARM


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_auto_is_rejection_when_sampling(drafter):
    assert sample(drafter, "top_p", 64)[0] == sample(drafter, "top_p", 64, acceptance="rejection")[0]
