"""α as the decoder reports it is 1 − TV(p, q) as the model defines it, and drafts are accepted that often.

The exact α comes from the enumerated p and q of `tiny_game`, in which the decoder has no part. Where a frequency is
compared, the false-alarm rate is FALSE_ALARM per test, two-sided, by the normal limit of a martingale; the seeds are
fixed, so the outcome is the same in every run.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import pytest
from scipy import stats
from tiny_game import CASES, DEPTH, DRAFTERS, PROMPTS, alpha, exact_p, sample

FALSE_ALARM = 1e-5
SAMPLES = 2048
MODEL_DRAFTERS = ("early_exit", "reduced", "independent")


def watched(drafter, case, count, rule, num_drafted):
    """Outputs, and per request its rounds as (generated so far, drafted, accepted)."""
    rounds, generated = defaultdict(list), defaultdict(tuple)

    def on_round(event):
        index = event.request.index
        rounds[index].append((generated[index], tuple(event.drafted_ids), event.record.num_accepted))
        generated[index] += tuple(event.emitted_ids)

    _, outputs = sample(drafter, case, count, acceptance=rule, lookahead=num_drafted, on_round=on_round)
    return outputs, [rounds[index] for index in range(count)]


def judged(rounds):
    """The prefix behind which each tested draft was judged, and whether it stood; not past what is enumerated."""
    for generated, drafted, num_accepted in rounds:
        for k in range(min(num_accepted + 1, len(drafted))):
            yield (*generated, *drafted[:k]), k < num_accepted


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("case, drafter", list(itertools.product(CASES, MODEL_DRAFTERS)))
def test_alpha_of_every_output_is_the_exact_one(case, drafter, rule):
    outputs, rounds = watched(drafter, case, 128, rule, num_drafted=1)
    for output, its_rounds in zip(outputs, rounds, strict=True):
        prefixes = [prefix for prefix, _ in judged(its_rounds)]
        assert output.alpha_count == len(prefixes)
        assert output.alpha_sum == pytest.approx(sum(alpha(drafter, case, prefix) for prefix in prefixes), abs=1e-4)


def test_alpha_of_a_certain_draft_is_its_probability():
    outputs, rounds = watched("ngram", "top_p", 128, "rejection", num_drafted=1)
    p = exact_p("ngram", "top_p")
    for output, its_rounds in zip(outputs, rounds, strict=True):
        expected = [p[generated][drafted[0]] for generated, drafted, _ in its_rounds if drafted]
        assert output.alpha_count == len(expected)
        assert output.alpha_sum == pytest.approx(sum(expected), abs=1e-4)


@pytest.mark.parametrize("case", ["temperature", "top_k", "presence", "custom"])
@pytest.mark.parametrize("drafter", MODEL_DRAFTERS)
def test_drafts_are_accepted_as_often_as_alpha_says(drafter, case):
    """Σ (accepted − α) over tested drafts is a martingale: in units of its spread, a standard normal number."""
    _, rounds = watched(drafter, case, SAMPLES, "rejection", num_drafted=3)
    surplus = spread = count = 0.0
    for prefix, stood in itertools.chain.from_iterable(map(judged, rounds)):
        if len(prefix) < DEPTH:
            expected = alpha(drafter, case, prefix)
            surplus, spread, count = surplus + stood - expected, spread + expected * (1 - expected), count + 1
    assert count > SAMPLES
    assert 2 * stats.norm.sf(abs(surplus) / math.sqrt(spread)) > FALSE_ALARM


@pytest.mark.parametrize("drafter", MODEL_DRAFTERS)
def test_block_accepts_no_less_and_coupled_no_more_than_rejection(drafter):
    """Block verification never accepts less in expectation; coupling agrees at least (1 − TV)/(1 + TV) of the time."""
    accepted, first_stood = {}, {}
    for rule in ("rejection", "block", "coupled"):
        _, rounds = watched(drafter, "temperature", SAMPLES, rule, num_drafted=3)
        accepted[rule] = sum(its_rounds[0][2] for its_rounds in rounds) / SAMPLES
        first_stood[rule] = sum(its_rounds[0][2] > 0 for its_rounds in rounds) / SAMPLES
    slack = stats.norm.isf(FALSE_ALARM) * 3 / math.sqrt(SAMPLES)  # a draft accepts 0 to 3: its spread is below 1.5
    assert accepted["block"] > accepted["rejection"] - slack
    assert accepted["coupled"] < accepted["rejection"] + slack
    overlap = alpha(drafter, "temperature", ())
    slack = stats.norm.isf(FALSE_ALARM) * 0.5 / math.sqrt(SAMPLES)
    assert overlap / (2 - overlap) - slack < first_stood["coupled"] < overlap + slack
    assert abs(first_stood["rejection"] - overlap) < slack


@pytest.mark.parametrize("rule", ["coupled", "typical"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_alpha_is_not_made_up_where_the_rule_does_not_know_q(drafter, rule):
    outputs, _ = watched(drafter, "temperature", 64, rule, num_drafted=2)
    assert {(output.alpha_sum, output.alpha_count) for output in outputs} == {(0.0, 0)}


@pytest.mark.parametrize("drafter", sorted(PROMPTS))
def test_counts_of_a_round_add_up(drafter):
    outputs, _ = watched(drafter, "top_k", 256, "rejection", num_drafted=3)
    for output in outputs:
        assert sum(record.num_emitted for record in output.rounds) == len(output.token_ids) == DEPTH
        for record in output.rounds:
            assert 0 <= record.num_accepted <= record.num_drafted <= 3
            assert 1 <= record.num_emitted <= record.num_accepted + 1
        assert output.alpha_sum <= output.alpha_count * (1 + 1e-6)
