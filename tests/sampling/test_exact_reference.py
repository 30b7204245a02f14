"""The exact reference: it enumerates everything, the rules pass it, and every planted fault fails it."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from selfspec.sampling.exact import (
    Chance,
    Choice,
    Game,
    branches,
    expected_emitted,
    output_distribution,
    target_distribution,
    total_variation,
    trim,
)
from selfspec.sampling.exact_device import corners, replay_draw
from selfspec.sampling.exact_rules import GREEDY, LOSSLESS, TYPICAL, Coupled, MemorylessRule, play_rejection, residual
from selfspec.sampling.games import GAMES, GREEDY_GAMES, LATTICE_CELLS, LATTICE_GAMES, LEVIATHAN_P, LEVIATHAN_Q, table
from selfspec.sampling.planted_faults import FAULTS

HALF, THIRD = Fraction(1, 2), Fraction(1, 3)
REJECTION = MemorylessRule("rejection", play_rejection)
QUICK = [game for game in GAMES if game.num_drafts < 3]


def one_draft(p: tuple[Fraction, ...], q: tuple[Fraction, ...]) -> Game:
    return Game("one draft", len(p), lambda _: p, lambda _: q, num_drafts=1, max_new_tokens=1)


def test_branches_visit_every_combination_once_and_sum_to_one() -> None:
    def play(chance: Chance) -> tuple[int, ...]:
        first = chance.choose((HALF, HALF))
        return (first, *(chance.choose((THIRD, Fraction(0), 2 * THIRD)) for _ in range(first + 1)))

    found = list(branches(play))
    assert sum(branch.probability for branch in found) == 1
    assert sorted(branch.result for branch in found) == sorted(
        [(0, a) for a in (0, 2)] + [(1, a, b) for a in (0, 2) for b in (0, 2)]
    )
    assert {branch.result: branch.probability for branch in found}[1, 2, 0] == HALF * 2 * THIRD * THIRD


def test_coins_are_clamped_and_certain_coins_do_not_branch() -> None:
    for probability, expected in ((Fraction(3, 2), True), (Fraction(-1), False)):
        found = list(branches(lambda chance, p=probability: chance.coin(p)))
        assert [branch.result for branch in found] == [expected]


def test_impossible_weights_are_an_error() -> None:
    with pytest.raises(ValueError, match="cannot choose"):
        Chance().choose((Fraction(0), Fraction(0)))
    with pytest.raises(ValueError, match="cannot choose"):
        Chance().choose((Fraction(2), Fraction(-1)))


def test_textbook_example_accepts_2_3_1_rejects_4_and_gives_p() -> None:
    stood, result = [Fraction(0)] * 3, [Fraction(0)] * 3
    for branch in branches(lambda chance: play_rejection(one_draft(LEVIATHAN_P, LEVIATHAN_Q), (), chance)):
        result[branch.result[0]] += branch.probability
        if len(branch.result) == 2:
            stood[branch.result[0]] += branch.probability
    assert stood == list(table(2, 3, 1))
    assert 1 - sum(stood) == Fraction(4, 10)
    assert result == list(table(6, 3, 1))


def test_p_equal_to_q_accepts_all_and_disjoint_supports_accept_nothing() -> None:
    p, q = table(6, 3, 1), table(0, 0, 10)
    assert expected_emitted(REJECTION, one_draft(p, p)) == 2
    assert expected_emitted(REJECTION, one_draft(table(5, 5, 0), q)) == 1
    assert output_distribution(REJECTION, one_draft(table(5, 5, 0), q)) == {(0,): HALF, (1,): HALF}
    assert residual(p, p) == p


def test_trimming_keeps_the_first_eos_and_the_length() -> None:
    game = replace(GAMES[0], eos=2, max_new_tokens=4)
    assert trim(game, (0, 2, 1)) == ((0, 2), True)
    assert trim(game, (0, 1)) == ((0, 1), False)
    assert trim(game, (0, 1, 0, 1, 2)) == ((0, 1, 0, 1), True)


def test_target_distribution_is_the_product_of_conditionals() -> None:
    game = GAMES[0]
    distribution = target_distribution(game)
    assert sum(distribution.values()) == 1
    assert distribution[0, 2, 1] == game.p(())[0] * game.p((0,))[2] * game.p((0, 2))[1]


@pytest.mark.parametrize("rule", LOSSLESS, ids=lambda rule: rule.name)
def test_rule_gives_exactly_the_targets_distribution(rule) -> None:
    for game in [*QUICK, *GREEDY_GAMES]:
        assert output_distribution(rule, game) == target_distribution(game), game.name


def test_greedy_and_coupled_give_exactly_the_targets_distribution() -> None:
    for game in GREEDY_GAMES:
        assert output_distribution(GREEDY, game) == target_distribution(game)
    for game in LATTICE_GAMES:
        assert output_distribution(Coupled(LATTICE_CELLS), game) == target_distribution(game)


@pytest.mark.parametrize("rule", FAULTS, ids=lambda rule: rule.name)
def test_planted_fault_is_caught(rule) -> None:
    assert max(total_variation(output_distribution(rule, game), target_distribution(game)) for game in QUICK) > 0.001


def test_typical_is_lossy() -> None:
    assert output_distribution(TYPICAL, GAMES[0]) != target_distribution(GAMES[0])


def test_a_round_that_adds_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        output_distribution(MemorylessRule("lazy", lambda game, prefix, chance: ()), GAMES[0])


def test_memory_is_handed_from_round_to_round() -> None:
    class Adaptive:
        """Drafts one token more after every round: K depends on the past only, so the output is still exact."""

        name = "adaptive draft length"

        def round(self, game, prefix, memory, chance):
            num_drafts = 0 if memory is None else memory
            return play_rejection(replace(game, num_drafts=num_drafts), prefix, chance), num_drafts + 1

    assert output_distribution(Adaptive(), GAMES[0]) == target_distribution(GAMES[0])


def test_intervals_and_corners_lie_inside_the_choice() -> None:
    choice = Choice((HALF, THIRD, 1 - HALF - THIRD), 1, "slot")
    assert choice.interval == (HALF, HALF + THIRD)
    branch = next(iter(branches(lambda chance: (chance.coin(HALF, "a"), chance.coin(THIRD, "b")))))
    assert len(corners(branch)) == 4
    assert all(0 < corner["a"] < 0.5 and 0 < corner["b"] < 1 / 3 for corner in corners(branch))


def test_draw_agrees_with_every_interval() -> None:
    assert replay_draw([game.p(()) for game in GAMES]).mismatches == []
