"""A statistical test that has never failed proves nothing: the χ² tests must see every planted fault.

Each must be rejected at CONTROL, a thousand times below the threshold of `test_chi_square.py`, which passes the same
runs without the fault. Seeds are fixed, so the outcome is the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import planted_decoder_faults as faults
import pytest
from chi_square import sequence_p_value
from test_chi_square import FALSE_ALARM
from tiny_game import exact_p, sample

SAMPLES = 3072
CONTROL = FALSE_ALARM / 1000


@dataclass(frozen=True)
class Control:
    plant: Callable[[pytest.MonkeyPatch], None]
    case: str = "temperature"
    rule: str = "rejection"
    drafter: str = "early_exit"
    num_drafted: int = 3


CONTROLS = [
    Control(faults.q_before_transforms, case="top_k"),
    Control(faults.q_before_transforms, case="top_k", rule="block"),
    Control(faults.q_before_transforms, case="everything", drafter="independent", num_drafted=1),
    Control(faults.argmax_verified_as_sampled, num_drafted=1),
    Control(faults.residual_not_subtracted),
    Control(faults.residual_not_subtracted, drafter="ngram"),
    Control(faults.residual_by_softmax),
    Control(faults.block_without_memory, rule="block"),
    Control(faults.bonus_from_raw_logits, case="logit_bias", num_drafted=1),
    Control(faults.bonus_from_raw_logits, num_drafted=1),
    Control(faults.draft_noise_tests_the_draft),
    Control(faults.draft_noise_tests_the_block),
    Control(faults.noise_of_the_test_draws_the_correction),
    Control(faults.rounds_share_noise, num_drafted=1),
    Control(faults.rounds_share_noise, rule="coupled", drafter="none"),
    Control(faults.requests_share_noise),
    Control(faults.penalties_of_the_round_start, case="presence"),
    Control(faults.penalties_of_the_round_start, case="frequency", rule="block"),
    Control(faults.penalties_of_the_round_start, case="custom", rule="coupled"),
    Control(faults.penalties_see_later_drafts, case="presence"),
    Control(faults.acceptance_conditioned_on_the_stop, case="top_k"),
    Control(faults.certain_draft_always_stands, drafter="ngram"),
]


@pytest.mark.parametrize("control", CONTROLS, ids=lambda c: f"{c.plant.__name__}-{c.case}-{c.rule}-{c.drafter}")
def test_planted_fault_is_seen(control, monkeypatch):
    control.plant(monkeypatch)
    options = dict(acceptance=control.rule, lookahead=control.num_drafted)
    tokens, _ = sample(control.drafter, control.case, SAMPLES, **options)
    assert sequence_p_value(tokens, exact_p(control.drafter, control.case)) < CONTROL


@pytest.mark.parametrize("drafter", ["early_exit", "ngram"])
def test_typical_acceptance_says_that_it_is_lossy_and_is(drafter):
    tokens, outputs = sample(drafter, "temperature", SAMPLES, acceptance="typical", lookahead=3)
    assert all(output.lossy for output in outputs)
    assert sequence_p_value(tokens, exact_p(drafter, "temperature")) < CONTROL
