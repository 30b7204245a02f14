"""Settings out of range are refused at once, with the value given and what is allowed."""

from __future__ import annotations

import math

import pytest

from selfspec.errors import UserError
from selfspec.sampling import Sampling, build_rule, build_transforms
from selfspec.sampling.acceptance.tree_rules import build_tree_rule

BAD = [
    ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "hot"),
    ("top_p", 0.0), ("top_p", -0.5), ("top_p", 1.01), ("top_p", math.nan),
    ("top_k", -1), ("top_k", 1.5), ("top_k", True),
    ("min_p", -0.1), ("min_p", 1.1),
    ("repetition_penalty", 0.0), ("repetition_penalty", -1.0),
    ("presence_penalty", math.inf), ("frequency_penalty", math.nan),
    ("no_repeat_ngram_size", -2), ("suppress_tokens", (1, -1)),
    ("logit_bias", {-1: 0.5}), ("logit_bias", {1: math.nan}), ("logit_bias", {1: math.inf}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{name}={value}" for name, value in BAD])
def test_setting_out_of_range_is_refused_by_name_and_value(name: str, value: object) -> None:
    with pytest.raises(UserError, match=name) as error:
        Sampling(**{name: value})
    assert repr(value) in str(error.value)
    assert "must be" in str(error.value)


def test_defaults_are_greedy_and_ask_for_nothing() -> None:
    assert Sampling().greedy
    assert build_transforms(Sampling()).identity
    assert not build_transforms(Sampling()).stateful


def test_logit_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match="100"):
        build_transforms(Sampling(logit_bias={100: 1.0}), vocab_size=100)


def test_a_processor_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(UserError, match="cannot be called"):
        build_transforms(Sampling(), processors=["top_k"])  # type: ignore[list-item]


def test_auto_is_greedy_at_temperature_0_and_rejection_above() -> None:
    assert build_rule("auto", Sampling()).name == "greedy"
    assert build_rule("auto", Sampling(temperature=0.7)).name == "rejection"


@pytest.mark.parametrize("acceptance", ["auto", "greedy", "rejection", "coupled", "block", "typical"])
def test_every_rule_is_greedy_acceptance_at_temperature_0(acceptance: str) -> None:
    rule = build_rule(acceptance, Sampling(temperature=0.0))
    assert rule.name == "greedy"
    assert not rule.lossy


@pytest.mark.parametrize("acceptance", ["rejection", "coupled", "block", "typical"])
def test_only_typical_is_lossy(acceptance: str) -> None:
    rule = build_rule(acceptance, Sampling(temperature=1.0))
    assert rule.name == acceptance
    assert rule.lossy == (acceptance == "typical")


def test_unknown_rule_and_greedy_when_sampling_are_refused() -> None:
    with pytest.raises(UserError, match="speculative.*rejection"):
        build_rule("speculative", Sampling())
    with pytest.raises(UserError, match="would not keep"):
        build_rule("greedy", Sampling(temperature=1.0))


def test_tree_rules_by_name() -> None:
    assert build_tree_rule("auto", Sampling()).name == "greedy"
    assert build_tree_rule("auto", Sampling(temperature=1.0)).name == "rejection"
    assert build_tree_rule("coupled", Sampling(temperature=1.0)).name == "coupled"
    with pytest.raises(UserError, match="no tree form"):
        build_tree_rule("block", Sampling(temperature=1.0))
    with pytest.raises(UserError, match="temperature=0"):
        build_tree_rule("greedy", Sampling(temperature=1.0))
