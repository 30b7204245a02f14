"""The certificate: `python -m selfspec.sampling.certify` shows that the acceptance rules keep the target's p.

1. The textbook numbers of rejection sampling, reproduced as fractions.
2. Every rule over every game: the distribution of finished outputs, over all random choices, equals the target's.
3. Block verification never emits fewer tokens per round in expectation than rejection.
4. The device code replays every branch of those enumerations and emits the same tokens.
5. Planted faults: every one must be caught, with the total variation distance it causes.

`--rule module:attr` certifies a rule of your own instead: an `ExactRule` (or a function or class that makes one), see
`selfspec.sampling.exact`. `--device module:attr` replays a tensor function of your own, with the arguments of
`accept_rejection`, against rejection sampling (`--like block`: against block verification).
Exits with 1 when anything fails. Takes about 15 s on one core.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import cast

from selfspec.errors import UserError
from selfspec.sampling.exact import (
    ExactRule,
    Game,
    branches,
    expected_emitted,
    output_distribution,
    target_distribution,
    total_variation,
)
from selfspec.sampling.exact_device import replay_all, replay_chain
from selfspec.sampling.exact_rules import (
    GREEDY,
    LOSSLESS,
    TYPICAL,
    Coupled,
    MemorylessRule,
    play_block,
    play_rejection,
    residual,
)
from selfspec.sampling.games import GAMES, GREEDY_GAMES, LATTICE_CELLS, LATTICE_GAMES, LEVIATHAN_P, LEVIATHAN_Q
from selfspec.sampling.planted_faults import FAULTS


@dataclass(frozen=True)
class Line:
    """One line of the certificate."""

    ok: bool
    claim: str
    evidence: str


def certificate() -> list[tuple[str, list[Line]]]:
    """All sections for the shipped rules."""
    return [
        ("Textbook numbers", textbook()),
        ("Output distribution equals the target's, exactly", [*exactness(), typical_is_lossy()]),
        ("Block verification emits at least as much as rejection, in expectation", [block_dominates()]),
        ("Device code (float64) replays every branch", device()),
        ("Planted faults are caught", [fault_is_caught(rule) for rule in FAULTS]),
    ]


def textbook() -> list[Line]:
    """p = (.6, .3, .1), q = (.2, .5, .3): accepted mass, rejection probability, result; p = q; disjoint supports."""
    p, q = LEVIATHAN_P, LEVIATHAN_Q
    accepted = tuple(min(a, b) for a, b in zip(p, q, strict=True))
    rejected = 1 - sum(accepted, Fraction(0))
    result = tuple(a + rejected * r for a, r in zip(accepted, residual(p, q), strict=True))
    enumerated = [Fraction(0)] * len(p)
    stood = [Fraction(0)] * len(p)
    game = Game("one draft", 3, lambda _: p, lambda _: q, num_drafts=1, max_new_tokens=1)
    for branch in branches(lambda chance: play_rejection(game, (), chance)):
        enumerated[branch.result[0]] += branch.probability
        if len(branch.result) == 2:
            stood[branch.result[0]] += branch.probability
    equal, apart = _named("p = q"), _named("disjoint supports")
    return [
        Line(
            tuple(stood) == accepted == (Fraction(1, 5), Fraction(3, 10), Fraction(1, 10)),
            "accepted mass", _decimals(stood),
        ),
        Line(1 - sum(stood, Fraction(0)) == rejected == Fraction(2, 5), "rejection probability", str(float(rejected))),
        Line(tuple(enumerated) == result == p, "result is p", _decimals(enumerated)),
        _line("p = q accepts every draft", expected_emitted(_rejection(), equal), Fraction(equal.num_drafts + 1)),
        _line("disjoint supports accept none", expected_emitted(_rejection(), apart), Fraction(1)),
    ]  # fmt: skip


def exactness() -> list[Line]:
    lines = [rule_is_exact(rule, [*GAMES, *GREEDY_GAMES]) for rule in LOSSLESS]
    return [*lines, rule_is_exact(GREEDY, GREEDY_GAMES), rule_is_exact(Coupled(LATTICE_CELLS), LATTICE_GAMES)]


def rule_is_exact(rule: ExactRule, games: Sequence[Game]) -> Line:
    distances = {game.name: _distance(rule, game) for game in games}
    wrong = {name: distance for name, distance in distances.items() if distance != 0}
    num_outputs = sum(len(target_distribution(game)) for game in games)
    if not wrong:
        return Line(
            True, rule.name, f"{len(games)} games, {num_outputs} outputs, every probability equal as a fraction"
        )
    return Line(False, rule.name, f"{len(wrong)} of {len(games)} games wrong: {_worst(wrong)}")


def typical_is_lossy() -> Line:
    wrong = {game.name: distance for game in GAMES if (distance := _distance(TYPICAL, game)) != 0}
    return Line(bool(wrong), "typical is lossy, and marked so", _worst(wrong) if wrong else "no game told it apart")


def block_dominates() -> Line:
    block: ExactRule = MemorylessRule("block", play_block)
    gains = {g.name: expected_emitted(block, g) - expected_emitted(_rejection(), g) for g in [*GAMES, *GREEDY_GAMES]}
    best = max(gains, key=lambda name: gains[name])
    return Line(
        min(gains.values()) >= 0,
        "block >= rejection",
        f"{len(gains)} games, {sum(gain > 0 for gain in gains.values())} strictly more; "
        f"most: +{float(gains[best]):.3f} tokens per round ({best})",
    )


def device() -> list[Line]:
    by_rule: dict[str, tuple[int, int, list[str]]] = {}
    for replay in replay_all(GAMES, GREEDY_GAMES):
        rule = replay.name.split(":")[0]
        num_branches, num_corners, mismatches = by_rule.get(rule, (0, 0, []))
        found = [f"{replay.name}: {mismatch}" for mismatch in replay.mismatches]
        by_rule[rule] = (num_branches + replay.num_branches, num_corners + replay.num_corners, mismatches + found)
    return [
        Line(not wrong, rule, f"{num_branches} branches, {num_corners} corners" + (f"; {wrong[0]}" if wrong else ""))
        for rule, (num_branches, num_corners, wrong) in by_rule.items()
    ]


def fault_is_caught(rule: ExactRule) -> Line:
    wrong = {game.name: distance for game in GAMES if (distance := _distance(rule, game)) != 0}
    if not wrong:
        return Line(False, rule.name, f"not caught in any of {len(GAMES)} games")
    return Line(True, rule.name, f"caught in {len(wrong)} of {len(GAMES)} games; {_worst(wrong)}")


def third_party(rule: ExactRule) -> list[tuple[str, list[Line]]]:
    """A rule of someone else's, one line per game."""
    lines = []
    for game in [*GAMES, *GREEDY_GAMES, *LATTICE_GAMES]:
        distance = _distance(rule, game)
        evidence = "equal as fractions" if distance == 0 else _worst({game.name: distance})
        lines.append(Line(distance == 0, game.name, evidence))
    return [(f"Rule {rule.name}: output distribution against the target's", lines)]


def third_party_device(rule: object, like: str) -> list[tuple[str, list[Line]]]:
    """A tensor function of someone else's, one line per game."""
    if not callable(rule):
        raise UserError(f"{rule!r} cannot be called with the arguments of `accept_rejection`.")
    play = play_block if like == "block" else play_rejection
    lines = []
    for game in GAMES:
        replay = replay_chain(like, game, play, rule)
        evidence = replay.mismatches[0] if replay.mismatches else f"{replay.num_corners} corners"
        lines.append(Line(not replay.mismatches, game.name, evidence))
    return [(f"Tensor function against {like}", lines)]


def load_rule(reference: str) -> ExactRule:
    """`module:attr` -> a rule; attr may be the rule itself or what makes one when called without arguments."""
    rule = load(reference)
    if callable(rule) and (isinstance(rule, type) or not hasattr(rule, "round")):
        try:
            rule = rule()
        except TypeError as error:
            raise UserError(f"{reference} is not an ExactRule and cannot be called to make one: {error}.") from error
    if not callable(getattr(rule, "round", None)) or not hasattr(rule, "name"):
        raise UserError(f"{reference} needs `name` and `round(game, prefix, memory, chance)`: see ExactRule.")
    return cast(ExactRule, rule)


def load(reference: str) -> object:
    """The object that `module:attr` names."""
    module_name, _, attribute = reference.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{reference}: {error}. Give module:attr, importable from here.") from error


def show(sections: Iterable[tuple[str, list[Line]]]) -> bool:
    """Print the certificate; True when every line holds."""
    all_ok = True
    for title, lines in sections:
        print(f"\n{title}")
        width = max(len(line.claim) for line in lines)
        for line in lines:
            print(f"  {'ok  ' if line.ok else 'FAIL'}  {line.claim:<{width}}  {line.evidence}")
            all_ok = all_ok and line.ok
    print(f"\n{'Certified.' if all_ok else 'NOT certified: see the lines marked FAIL.'}")
    return all_ok


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m selfspec.sampling.certify", description=__doc__.split("\n")[0])
    parser.add_argument("--rule", metavar="module:attr", help="certify a rule of your own instead of the shipped ones")
    parser.add_argument("--device", metavar="module:attr", help="replay a tensor function of your own")
    parser.add_argument("--like", choices=["rejection", "block"], default="rejection", help="what --device implements")
    options = parser.parse_args(arguments)
    try:
        if options.rule:
            sections = third_party(load_rule(options.rule))
        elif options.device:
            sections = third_party_device(load(options.device), options.like)
        else:
            sections = certificate()
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    return 0 if show(sections) else 1


def _distance(rule: ExactRule, game: Game) -> Fraction | str:
    """Total variation distance to the target; the error's text when the rule breaks."""
    try:
        return total_variation(output_distribution(rule, game), target_distribution(game))
    except Exception as error:  # a third party's rule may raise anything; that is a failed game, with its reason
        return f"{type(error).__name__}: {error}"


def _worst(distances: dict[str, Fraction | str]) -> str:
    name, distance = max(distances.items(), key=lambda item: 1.0 if isinstance(item[1], str) else float(item[1]))
    return (
        f"{distance} ({name})" if isinstance(distance, str) else f"total variation up to {float(distance):.4f} ({name})"
    )


def _rejection() -> ExactRule:
    return MemorylessRule("rejection", play_rejection)


def _named(name: str) -> Game:
    return next(game for game in GAMES if game.name == name)


def _line(claim: str, got: Fraction, want: Fraction) -> Line:
    return Line(got == want, claim, f"{float(got):g} tokens per round")


def _decimals(values: Iterable[Fraction]) -> str:
    return "(" + ", ".join(f"{float(value):g}" for value in values) + ")"


if __name__ == "__main__":
    sys.exit(main())
