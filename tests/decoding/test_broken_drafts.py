"""A draft whose logits hold NaN or +inf is named, in chains and in trees of either kind, where the output comes to the
place; elsewhere it takes nothing from the rest of the draft.
"""

from __future__ import annotations

import math

import pytest
import torch
from tree_drafters import TARGET, drafter_of

from selfspec import Sampling, UserError, decode
from selfspec.decoding.rows import Rows
from selfspec.drafters.base import Draft
from selfspec.drafters.hybrid import choose
from selfspec.measure.rank_accuracy import rank_accuracy
from tiny_models import prompt_ids

PROMPT = prompt_ids(9)
LOOKAHEADS = {
    "chain": {"kind": "fixed", "num_drafted": 3},
    "tree": {"kind": "tree", "branches": [2, 2, 1]},
    "dynamic": {"kind": "dynamic_tree", "depth": 3, "top_k": 2, "num_nodes": 11},
}
RULES = {"greedy": (0.0, "auto"), **{name: (1.0, name) for name in ("rejection", "block", "coupled", "typical")}}
PAIRS = [(kind, rule) for kind in LOOKAHEADS for rule in RULES if kind == "chain" or rule not in ("block", "typical")]
BROKEN = r"the draft's logits hold NaN or \+inf: check the drafter's weights"


class Spoiled:
    """Drafts as `inner` does, from logits that are spoilt at one level; spoil: logits [B, n, V] -> the same."""

    name, max_drafted = "spoiled", None

    def __init__(self, inner, spoil_at):
        self.inner, self.spoil_at = inner, spoil_at
        self.start, self.prefill = inner.start, inner.prefill

    def propose(self, rows, drafting):
        return self.inner.propose(rows, Spoiling(drafting, self.spoil_at))

    def propose_tree(self, rows, growing):
        return self.inner.propose_tree(rows, Spoiling(growing, self.spoil_at))


class Spoiling:
    """A draft phase."""

    def __init__(self, drafting, spoil_at):
        self.drafting, self.spoil_at, self.level = drafting, spoil_at, 0

    def __getattr__(self, name):
        return getattr(self.drafting, name)

    def __iter__(self):
        for level in self.drafting:
            self.level = level
            yield level

    def draw(self, logits_BV):
        return self.drafting.draw(self._spoil(logits_BV[:, None])[:, 0])

    def grow(self, logits_BnV):
        self.drafting.grow(self._spoil(logits_BnV))

    def _spoil(self, logits_BnV):
        return self.spoil_at[self.level](logits_BnV.clone()) if self.level in self.spoil_at else logits_BnV


def one_bad(value):
    def spoil(logits_BnV):
        logits_BnV[..., 3] = value
        return logits_BnV

    return spoil


def call(drafter, kind, rule="greedy", **options):
    temperature, acceptance = RULES[rule]
    options = dict(max_new_tokens=24, ignore_eos=True, seed=1, lookahead=LOOKAHEADS[kind]) | options
    sampling = Sampling(temperature=temperature)
    return decode(TARGET, drafter, [PROMPT], sampling=sampling, acceptance=acceptance, **options)[0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize(("kind", "rule"), PAIRS)
def test_a_broken_draft_is_named_with_its_position(kind, rule, level, value):
    """The draft is the target itself: what it drafts before is accepted, for certain where p = q is all that counts."""
    drafter = Spoiled(drafter_of("independent_equal"), {level: one_bad(value)})
    has_q = kind == "chain" and rule in ("rejection", "block")
    first_round = rule in ("greedy", "coupled") or (rule in ("rejection", "block") and kind != "dynamic")
    position = len(PROMPT) + level if first_round else r"\d+"
    message = "the drafter's q is not a distribution" if has_q else BROKEN
    with pytest.raises(UserError, match=f"row 0, position {position}: {message}"):
        call(drafter, kind, rule)


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize("kind", LOOKAHEADS)
def test_what_lies_behind_a_rejected_draft_is_not_at_fault(kind, rule):
    plain = decode(TARGET, None, [PROMPT], max_new_tokens=24, ignore_eos=True, seed=1,
                   sampling=Sampling(temperature=RULES[rule][0]), acceptance=RULES[rule][1])[0].token_ids  # fmt: skip
    never = min(set(range(TARGET.vocab_size)) - set(plain))

    def only_never(logits_BnV):
        return torch.full_like(logits_BnV, -math.inf).index_fill_(2, torch.tensor([never]), 0.0)

    drafter = Spoiled(drafter_of("independent_equal"), {0: only_never, 1: one_bad(math.nan)})
    output = call(drafter, kind, rule)
    assert output.token_ids == plain
    assert output.alpha_count == (len(output.rounds) if rule == "greedy" else 0), "each round counts"


@pytest.mark.parametrize("kind", ["tree", "dynamic"])
def test_a_broken_branch_takes_nothing_from_the_others(kind):
    """The second-best first token's children; NaN would be the likeliest of all candidates."""

    def second_node(logits_BnV):
        logits_BnV[:, 1, 3] = math.nan
        return logits_BnV

    lookahead = LOOKAHEADS[kind] | ({"num_nodes": 5} if kind == "dynamic" else {})
    whole = call(drafter_of("independent_equal"), kind, lookahead=lookahead)
    spoilt = call(Spoiled(drafter_of("independent_equal"), {1: second_node}), kind, lookahead=lookahead)
    assert spoilt.token_ids == whole.token_ids
    assert len(spoilt.rounds) <= len(whole.rounds), "its place in a dynamic tree may go to others"


def test_a_draft_with_nothing_left_is_not_broken():
    """A reduced vocabulary under a strict transform: it costs acceptance, and nothing else."""

    def nothing(logits_BnV):
        return torch.full_like(logits_BnV, -math.inf)

    drafter = Spoiled(drafter_of("independent_equal"), {0: nothing})
    for kind, rule in PAIRS:
        assert len(call(drafter, kind, rule).token_ids) == 24


def test_a_hybrids_broken_learned_draft_is_named_where_it_drafts():
    copied = Draft(torch.tensor([[7, 8], [0, 0]]), torch.tensor([2, 0]))
    learned = Draft(torch.tensor([[3], [3]]), torch.tensor([1, 1]), broken_BK=torch.tensor([[True], [True]]))
    assert choose(Rows(TARGET, 2, 40), copied, learned).broken_BK.tolist() == [[False, False], [True, False]]


def test_a_broken_draft_has_no_ranks():
    """Nothing is above NaN: every token would rank first, at the second depth here."""
    drafter = Spoiled(drafter_of("independent_equal"), {1: one_bad(math.nan)})
    with pytest.raises(UserError, match=BROKEN):
        rank_accuracy(TARGET, drafter, [PROMPT], max_depth=2, max_new_tokens=6)
