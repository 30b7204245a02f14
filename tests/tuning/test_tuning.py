"""Predictions against simulated rounds of known acceptance and costs; the grid, and what of it is run."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from selfspec.errors import UserError
from selfspec.lookahead import build_lookahead
from selfspec.lookahead.tree_shape import TreeShape, best_shape
from selfspec.measure.cost_model import expected_tau
from selfspec.records import PromptRecord, RoundRecord
from selfspec.report.estimators import conditional_acceptance
from selfspec.tuning.grid import Candidate, Grid, Variant, candidates_of, to_measure, variants_of
from selfspec.tuning.prediction import (
    Curve,
    Known,
    Predicted,
    Reference,
    RoundCost,
    acceptance_of,
    expected_rounds,
    predict,
    promising,
    tokens_per_s,
    tree_acceptance,
)

ACCEPTANCE = [0.7, 0.6, 0.5, 0.45, 0.4]
RANKS = [[0.7, 0.15, 0.05], [0.6, 0.2, 0.08], [0.5, 0.2, 0.1]]
V = Curve({1: 1.0, 2: 1.04, 4: 1.1, 6: 1.3, 8: 1.35, 16: 2.0})
AR_S, PREFILL_S, LENGTHS = 0.010, 0.030, [24, 31, 40, 64]
Accept = Callable[[random.Random], int]


def simulated(num_drafted: int, cost: RoundCost, accept: Accept, seed: int = 0, copies: int = 60) -> list[PromptRecord]:
    """Answers of LENGTHS, many times over; the last round of each is cut at its length, as the decoder cuts it."""
    rng, records = random.Random(seed), []
    for place, length in enumerate(LENGTHS * copies):
        rounds, left = list[RoundRecord](), length
        while left:
            accepted = accept(rng)
            emitted = min(accepted + 1, left)
            left -= emitted
            rounds.append(RoundRecord(num_drafted, accepted, emitted, cost.draft_s, cost.verify_s, cost.other_s))
        decode_s = len(rounds) * cost.total_s
        records.append(
            PromptRecord(
                f"p{place}", "made", "m", 0, 9, list(range(length)), "", "length", False, PREFILL_S, PREFILL_S,
                decode_s, PREFILL_S + decode_s, rounds=rounds,
            )
        )  # fmt: skip
    return records


def chain(num_drafted: int) -> Accept:
    def accept(rng: random.Random) -> int:
        accepted = 0
        while accepted < num_drafted and rng.random() < ACCEPTANCE[accepted]:
            accepted += 1
        return accepted

    return accept


def tree(shape: TreeShape) -> Accept:
    """At each depth the right token has one rank or none; the path goes on while it is in the tree."""

    def accept(rng: random.Random) -> int:
        node = depth = 0
        while depth < len(RANKS):
            drawn, rank = rng.random(), 0
            while rank < len(RANKS[depth]) and drawn >= sum(RANKS[depth][: rank + 1]):
                rank += 1
            if rank >= len(shape.children[node]):
                break
            node, depth = shape.children[node][rank], depth + 1
        return depth

    return accept


def chain_cost(num_drafted: int) -> RoundCost:
    return RoundCost(0.001 + 0.0012 * num_drafted, 0.95 * AR_S * V(num_drafted + 1), 0.0004 + 0.0001 * num_drafted)


def tree_cost(shape: TreeShape) -> RoundCost:
    """Wider levels cost more, and a tree has to be walked: three times a chain's management."""
    wide_s = sum(0.0012 * (V(end - first) - 1) for first, end, _ in shape.levels if end > first)
    plain = chain_cost(shape.depth)
    return RoundCost(1.2 * (plain.draft_s + wide_s), 0.95 * AR_S * V(shape.num_nodes), 3 * plain.other_s)


def rate(records: Sequence[PromptRecord]) -> float:
    return sum(len(record.token_ids) for record in records) / sum(record.total_s for record in records)


REFERENCE = Reference(AR_S, PREFILL_S, LENGTHS)
VARIANT = Variant("head", "head", {"kind": "eagle3"}, (1, 2, 3, 4, 5), (4, 6, 8), ({"kind": "expected_gain"},))


@pytest.fixture(scope="module")
def known() -> Known:
    """As the tuner learns it: from the records of the shortest and the longest chain and of the largest tree."""
    shortest, longest = (simulated(k, chain_cost(k), chain(k), seed=k) for k in (1, 5))
    biggest = to_measure(candidates_of(VARIANT, RANKS))["tree"].shape
    assert biggest is not None
    walked = simulated(biggest.depth, tree_cost(biggest), tree(biggest))
    acceptance = acceptance_of(longest)
    return Known(
        acceptance, PREFILL_S, RoundCost.of(shortest), RoundCost.of(longest), (biggest, RoundCost.of(walked)), RANKS
    )


def candidate(label: str) -> Candidate:
    return next(one for one in candidates_of(VARIANT, RANKS) if one.label == f"head.{label}")


@pytest.mark.parametrize("num_drafted", [1, 2, 3, 4, 5])
def test_a_chain_is_predicted_from_the_shortest_and_the_longest_one(known: Known, num_drafted: int) -> None:
    found = predict(candidate(f"K{num_drafted}"), known, REFERENCE, V)
    real = rate(simulated(num_drafted, chain_cost(num_drafted), chain(num_drafted), seed=77))
    assert found.tokens_per_s == pytest.approx(real, rel=0.015)
    assert found.tau == pytest.approx(expected_tau(ACCEPTANCE[:num_drafted]), rel=0.015)
    assert found.round_s == pytest.approx(chain_cost(num_drafted).total_s, rel=1e-6)
    assert found.tau / (num_drafted * found.c + found.v) == pytest.approx(found.tau * AR_S / found.round_s)


def test_without_the_curve_of_v_the_middle_of_the_grid_is_predicted_worse(known: Known) -> None:
    """The negative control: v bends between 2 and 6 positions; a straight line misses that by more than is allowed."""
    straight = Curve({1: 1.0, 2: V(2), 6: V(6)})
    errors = [
        abs(predict(candidate("K3"), known, REFERENCE, v).round_s / chain_cost(3).total_s - 1) for v in (V, straight)
    ]
    assert errors[0] < 1e-6 and errors[1] > 0.02


@pytest.mark.parametrize("num_nodes", [4, 6, 8])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_tree_is_predicted_from_accuracies_by_rank_and_the_largest_tree(
    known: Known, num_nodes: int, depth: int
) -> None:
    shape, accepted = best_shape(RANKS[:depth], num_nodes)
    assert sum(_joint(tree_acceptance(shape, RANKS))) == pytest.approx(accepted), "best_shape's own expectation"
    if shape.num_nodes == shape.depth + 1:
        return
    found = predict(candidate(f"tree{shape.num_nodes}d{shape.depth}"), known, REFERENCE, V)
    assert found.candidate.shape == shape
    real = rate(simulated(shape.depth, tree_cost(shape), tree(shape), seed=78))
    assert found.tokens_per_s == pytest.approx(real, rel=0.015)


def _joint(acceptance: Sequence[float]) -> list[float]:
    joint, reached = [], 1.0
    for chance in acceptance:
        reached *= chance
        joint.append(reached)
    return joint


def test_rounds_are_counted_with_the_last_one_cut_short() -> None:
    assert expected_rounds([], 3) == [0, 1, 2, 3]
    assert expected_rounds([1.0, 1.0], 7) == [0, 1, 1, 1, 2, 2, 2, 3]
    rounds = expected_rounds(ACCEPTANCE, 4000)
    assert 4000 / rounds[4000] == pytest.approx(expected_tau(ACCEPTANCE), rel=1e-3)
    assert rounds[24] > 24 / expected_tau(ACCEPTANCE) + 0.1, "an answer ends inside a round"


def test_where_positions_are_free_the_largest_tree_is_foretold_and_where_they_cost_a_short_chain() -> None:
    def foretold(v: Curve) -> str:
        costs = [RoundCost(0.0001 * k, AR_S * v(k + 1), 0.0) for k in (1, 5)]
        biggest = candidate("tree8d3").shape
        assert biggest is not None
        of_biggest = RoundCost(0.0003, AR_S * v(biggest.num_nodes), 0.0)
        known = Known([0.5] * 5, PREFILL_S, *costs, (biggest, of_biggest), RANKS)
        found = [predict(one, known, REFERENCE, v) for one in candidates_of(VARIANT, RANKS)]
        return promising(found, top=1)[0].candidate.label

    assert foretold(Curve({1: 1.0, 16: 1.0})) == "head.tree8d3"
    assert foretold(Curve({1: 1.0, 2: 1.3, 16: 16.0})) == "head.K1"


def test_no_draft_is_predicted_as_it_was_measured() -> None:
    records = simulated(0, RoundCost(0.0, AR_S, 0.0), lambda rng: 0)
    assert REFERENCE.tokens_per_s == pytest.approx(rate(records))
    assert tokens_per_s([], AR_S, PREFILL_S, LENGTHS) == REFERENCE.tokens_per_s


def test_acceptance_counts_the_rounds_that_an_answer_s_end_cut_short() -> None:
    """Whole rounds alone read too low: what accepted much is what is cut."""
    longest = simulated(5, chain_cost(5), chain(5), seed=5, copies=400)
    assert acceptance_of(longest)[0] == pytest.approx(ACCEPTANCE[0], abs=0.005)
    whole = conditional_acceptance(longest)
    assert whole[0] is not None and whole[0] < ACCEPTANCE[0] - 0.005


def test_a_draft_that_is_not_made_counts_as_refused() -> None:
    """Prompt lookup drafts nothing in half of its rounds: what it drafts always stands, and τ is 1.5 for K = 1."""
    rounds = [RoundRecord(1, 1, 2, 0.0, 0.01, 0.0), RoundRecord(0, 0, 1, 0.0, 0.01, 0.0)] * 8
    record = PromptRecord(
        "p", "made", "m", 0, 9, list(range(24)), "", "length", False, 0.1, 0.1, 0.16, 0.26, rounds=rounds
    )
    assert expected_tau(acceptance_of([record])) == pytest.approx(1.5)


def test_what_the_clocks_of_a_round_missed_is_management() -> None:
    (record,) = simulated(1, RoundCost(0.001, 0.01, 0.002), chain(1), copies=1)[:1]
    record.decode_s += 0.1
    assert RoundCost.of([record]).other_s == pytest.approx(0.002 + 0.1 / len(record.rounds))


def test_a_policy_is_predicted_as_its_best_chain_and_as_no_draft_where_none_pays(known: Known) -> None:
    best = max(
        (predict(candidate(f"K{k}"), known, REFERENCE, V) for k in range(1, 6)), key=lambda one: one.tokens_per_s
    )
    assert predict(candidate("expected_gain"), known, REFERENCE, V).tokens_per_s == best.tokens_per_s
    hopeless = Known([0.01] * 5, PREFILL_S, known.shortest, known.longest)
    assert predict(candidate("expected_gain"), hopeless, REFERENCE, V).tokens_per_s == REFERENCE.tokens_per_s
    assert predict(candidate("K1"), hopeless, REFERENCE, V).tokens_per_s < REFERENCE.tokens_per_s


def test_a_wider_pass_that_was_measured_as_cheaper_is_noise() -> None:
    noisy = Curve({1: 1.0, 4: 1.3, 5: 1.1, 8: 1.5})
    assert [noisy(width) for width in (4, 5, 8)] == [1.3, 1.3, 1.5]
    assert noisy(6) == pytest.approx(1.3 + 0.2 / 3)


def _predicted(label: str, drafter: str, tokens_per_s: float) -> Predicted:
    one = Candidate(label, Variant(label, drafter, {}, (1,)), {}, 1)
    return Predicted(one, tokens_per_s, 1.0, 0.01, 0.1, 1.0)


def test_only_the_fastest_by_prediction_and_the_best_of_every_drafter_are_promising() -> None:
    speeds = {"a1": 9.0, "a2": 8.0, "a3": 7.0, "b1": 2.0, "b2": 1.0, "c1": 8.5}
    found = promising([_predicted(label, label[0], speed) for label, speed in speeds.items()], top=3)
    assert [one.candidate.label for one in found] == ["a1", "c1", "a2", "b1"]


# ---- the grid


def test_every_combination_of_swept_options_is_a_variant_and_its_own_grid_stands_for_the_common_one() -> None:
    given = {
        "kind": "early_exit",
        "sweep": {"exit_layer": [20, 24], "d_vocab": [None, 4096], "num_drafted": [5, 2, 2], "tree_nodes": []},
    }
    found = variants_of("exit", given, Grid([1, 2], [4], ["expected_gain"]))
    assert [one.label for one in found] == [
        "exit-exit_layer_20-d_vocab_all", "exit-exit_layer_20-d_vocab_4096",
        "exit-exit_layer_24-d_vocab_all", "exit-exit_layer_24-d_vocab_4096",
    ]  # fmt: skip
    assert found[3].options == {"kind": "early_exit", "exit_layer": 24, "d_vocab": 4096}
    assert {(one.num_drafted, one.tree_nodes, one.policies[0]["kind"]) for one in found} == {
        ((2, 5), (), "expected_gain")
    }
    nested = variants_of("both", {"kind": "hybrid", "sweep": {"learned": [{"kind": "mtp", "checkpoint": "x"}]}}, Grid())
    assert nested[0].label == "both-learned_mtp" and nested[0].options["learned"]["checkpoint"] == "x"


def test_a_draft_gets_no_longer_chain_than_it_can_make_and_trees_only_if_it_grows_them() -> None:
    labels = [one.label for one in candidates_of(VARIANT, None, max_drafted=2)]
    assert labels == ["head.K1", "head.K2", "head.expected_gain"]
    gain = candidates_of(VARIANT, None, max_drafted=2)[-1]
    assert gain.lookahead == {"kind": "expected_gain", "max_drafted": 2} and gain.most == 2
    with_trees = candidates_of(VARIANT, RANKS)
    assert all(one.shape.num_nodes > one.shape.depth + 1 for one in with_trees if one.shape), "chains are chains"
    assert len({one.label for one in with_trees}) == len(with_trees)
    for one in with_trees:
        assert build_lookahead(one.lookahead).max_drafted == one.most
    assert {role: one.label for role, one in to_measure(with_trees).items()} == {
        "shortest": "head.K1", "longest": "head.K5", "tree": "head.tree8d3",
    }  # fmt: skip
    bandit = Variant("head", "head", {}, (1, 2), (), ({"kind": "bandit", "num_drafted": [0, 1, 2, 8]},))
    assert candidates_of(bandit)[-1].lookahead["num_drafted"] == [0, 1, 2]


def test_a_dynamic_tree_is_predicted_as_the_static_one_and_can_be_built_as_it_is_run() -> None:
    policy = {"kind": "dynamic_tree", "depth": 4, "top_k": 2, "num_nodes": 6}
    (variant,) = variants_of("head", {"kind": "mtp"}, Grid([1, 3], [6], [policy]))
    for depth, kept in ((3, 3), (2, 2), (1, None)):
        found = candidates_of(variant, [[0.5, 0.3]] * depth)
        dynamic = [one for one in found if one.lookahead["kind"] == "dynamic_tree"]
        assert [one.lookahead["depth"] for one in dynamic] == ([kept] if kept else []), "too shallow for 6 nodes at 1"
        for one in dynamic:
            assert build_lookahead(one.lookahead).max_drafted == one.most == kept
            assert one.shape == best_shape([[0.5, 0.3]] * depth, 6)[0]


@pytest.mark.parametrize(
    ("given", "grid", "message"),
    [
        ({}, Grid([]), "the grid of x is empty"),
        ({"sweep": {"num_drafted": []}}, Grid(), "sweep.num_drafted=[]: give a list with one value or more"),
        ({"sweep": {"exit_layer": 20}}, Grid(), "sweep.exit_layer=20: give a list"),
        ({"sweep": [1]}, Grid(), "sweep=[1]: give a mapping"),
        ({"lookahead": 3}, Grid(), "the lookahead is what is tuned"),
        ({}, Grid([0, 1]), "num_drafted=[0, 1]: give whole numbers of 1 or more"),
        ({}, Grid([1], [1]), "tree_nodes=[1]: give whole numbers of 2 or more"),
        ({}, Grid([1], [], ["expected_gian"]), "Did you mean 'expected_gain'?"),
        ({}, Grid([1], [], [{"kind": "tree", "branches": [2]}]), "'tree' is no policy that adapts"),
        ({}, Grid([1], [], [3]), "policies=3: give conf/lookahead names"),
    ],
)
def test_a_grid_that_cannot_be_tried_is_refused(given: dict, grid: Grid, message: str) -> None:
    with pytest.raises(UserError) as raised:
        variants_of("x", {"kind": "ngram", **given}, grid)
    assert message in str(raised.value)


def test_a_grid_beyond_what_a_draft_can_make_is_empty() -> None:
    with pytest.raises(
        UserError, match="head drafts at most 2 tokens, and its grid has num_drafted=.3, 4.: the grid is"
    ):
        candidates_of(Variant("head", "head", {}, (3, 4)), None, max_drafted=2)
