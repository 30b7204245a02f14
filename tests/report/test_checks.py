"""A record that contradicts itself, or runs that do not belong together, never become a table."""

from __future__ import annotations

import math

import pytest
from made_runs import made_record, made_records, write_run

from selfspec.errors import UserError
from selfspec.records import RoundRecord, read_run
from selfspec.report.checks import check_record, check_together
from selfspec.report.statistics import summarise


def broken(**changes):
    return made_record("p7", "early_exit", emitted=[2, 3], num_drafted=4, **changes)


ROUND = {"draft_s": 0.1, "verify_s": 0.1, "other_s": 0.0}
BROKEN = {
    "rounds emitted 5 tokens": broken(token_ids=[1, 2, 3]),
    "accepted 5 of 4": broken(rounds=[RoundRecord(4, 5, 5, **ROUND)]),
    "accepted 0 drafts but emitted 5": broken(rounds=[RoundRecord(4, 0, 5, **ROUND)]),
    "emitted 0 tokens": broken(rounds=[RoundRecord(4, 4, 5, **ROUND), RoundRecord(4, 4, 0, **ROUND)]),
    "cut short before the last": broken(rounds=[RoundRecord(4, 4, 3, **ROUND), RoundRecord(4, 1, 2, **ROUND)]),
    "negative": broken(rounds=[RoundRecord(4, 4, 5, -0.1, 0.1, 0.0)]),
    "no token": broken(token_ids=[], rounds=[]),
    "decode_s is nan": broken(decode_s=math.nan, total_s=1.0),
    "total_s is 0": broken(prefill_s=0.0, decode_s=0.0, ttft_s=0.0),
    "is not prefill_s": broken(total_s=2.0),
    "longer than total_s": broken(ttft_s=5.0),
    "alpha_sum": broken(alpha_sum=11.0, alpha_count=10),
    "finish_reason": broken(finish_reason="done"),
    "divergence_class is": broken(divergence_class="close"),
    "equals_ar is True but": broken(equals_ar=True, divergence_class="near_tie"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_invariant_names_run_prompt_and_method(what):
    with pytest.raises(UserError) as error:
        check_record(BROKEN[what], "run-0123abcd")
    message = str(error.value)
    assert what in message
    assert all(part in message for part in ("run-0123abcd", "'p7'", "'early_exit'"))


def test_intact_records_pass():
    for record in [broken(), *made_records()]:
        check_record(record, "run")


def test_claimed_equality_is_checked_against_the_tokens():
    liar = made_record("a", "early_exit", token_ids=[0, 1, 9], equals_ar=True)
    with pytest.raises(UserError, match="tokens say otherwise"):
        summarise([made_record("a", "ar"), liar])
    modest = made_record("a", "early_exit", equals_ar=False, divergence_class="mismatch")
    with pytest.raises(UserError, match="tokens say otherwise"):
        summarise([made_record("a", "ar"), modest])


def test_no_records_is_an_error():
    with pytest.raises(UserError, match="no results"):
        summarise([])


@pytest.fixture
def two_machines(tmp_path):
    records = made_records(num_prompts=2, repeats=1)
    one = write_run(tmp_path / "a-00000001", records)
    other = write_run(tmp_path / "b-00000002", records, machine={"host_hash": "lab2", "cpu": "EPYC"})
    return [read_run(one), read_run(other)]


def test_two_machines_are_refused_unless_asked(two_machines):
    with pytest.raises(UserError, match=r"different machines .*host_hash: lab1 / lab2.*allow_mixed=true"):
        check_together(two_machines)
    check_together(two_machines, allow_mixed=True)


def test_the_same_configuration_twice_is_refused(tmp_path):
    records = made_records(num_prompts=2, repeats=1)
    runs = [read_run(write_run(tmp_path / name / "a-00000001", records)) for name in ("x", "y")]
    with pytest.raises(UserError, match="same configuration"):
        check_together(runs)


def test_an_empty_set_of_runs_is_an_error():
    with pytest.raises(UserError, match="no run directory"):
        check_together([])
