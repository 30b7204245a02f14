"""The cases that the certificate plays: small models and every circumstance that has broken a decoder.

Models are tables of small fractions that change with the whole prefix, so that a mistake at position 2 shows.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace
from fractions import Fraction

from selfspec.sampling.exact import Distribution, Game, Model, Tokens
from selfspec.sampling.exact_rules import argmax, norm

V = 3


def table(*tenths: int) -> Distribution:
    return tuple(Fraction(n, 10) for n in tenths)


LEVIATHAN_P, LEVIATHAN_Q = table(6, 3, 1), table(2, 5, 3)


def _scramble(salt: str, prefix: Tokens, index: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{salt} {prefix} {index}".encode()).digest()[:4], "little")


def scrambled(salt: str, support: Tokens = (0, 1, 2)) -> Model:
    """Weights 1..5 that depend on the whole prefix; none outside the support."""

    def model(prefix: Tokens) -> Distribution:
        weights = [1 + _scramble(salt, prefix, v) % 5 for v in range(V)]
        return norm(tuple(Fraction(w if v in support else 0) for v, w in enumerate(weights)))

    return model


def on_lattice(salt: str, cells: int) -> Model:
    """Distributions whose masses are multiples of 1/cells (zeros occur)."""

    def model(prefix: Tokens) -> Distribution:
        cuts = sorted(_scramble(salt, prefix, i) % (cells + 1) for i in range(V - 1))
        bounds = [0, *cuts, cells]
        return tuple(Fraction(high - low, cells) for low, high in itertools.pairwise(bounds))

    return model


def sharpened_top_2(prefix: Tokens, raw: Distribution) -> Distribution:
    """Temperature 1/2 (squares), then top-k with k = 2."""
    squares = tuple(mass * mass for mass in raw)
    kept = sorted(range(V), key=lambda v: (-squares[v], v))[:2]
    return norm(tuple(square if v in kept else Fraction(0) for v, square in enumerate(squares)))


def penalty(prefix: Tokens, raw: Distribution) -> Distribution:
    """Frequency penalty: a third of the weight per occurrence so far."""
    return norm(tuple(mass / 3 ** prefix.count(v) for v, mass in enumerate(raw)))


def no_repeat(prefix: Tokens, raw: Distribution) -> Distribution:
    """no_repeat_ngram_size = 2 where that leaves a token."""
    banned = {b for a, b in itertools.pairwise(prefix) if a == prefix[-1]}
    kept = tuple(Fraction(0) if v in banned else mass for v, mass in enumerate(raw))
    return norm(kept) if any(kept) else raw


def one_hot(prefix: Tokens, raw: Distribution) -> Distribution:
    """Temperature 0."""
    return tuple(Fraction(v == argmax(raw)) for v in range(V))


def unsure(path: Tokens, next_q: Distribution) -> bool:
    """A draft-side stop that may be used: it looks at the path and at the next q, not at the next token."""
    return max(next_q) < Fraction(2, 5) or sum(path) % 3 == 2


_BASE = Game("independent models", V, scrambled("target 1"), scrambled("draft 1"))

GAMES: list[Game] = [
    _BASE,
    replace(_BASE, name="Leviathan's example", raw_target=lambda _: LEVIATHAN_P, raw_draft=lambda _: LEVIATHAN_Q),
    replace(_BASE, name="p = q", raw_draft=_BASE.raw_target),
    replace(_BASE, name="disjoint supports", raw_target=scrambled("t", (0, 1)), raw_draft=scrambled("d", (2,))),
    replace(_BASE, name="reduced draft vocabulary", raw_draft=scrambled("draft 1", (0, 1))),
    replace(_BASE, name="zeros in both", raw_target=on_lattice("target 10", 4), raw_draft=on_lattice("draft 10", 4)),
    replace(_BASE, name="temperature and top-k", transform=sharpened_top_2),
    replace(_BASE, name="frequency penalty", transform=penalty),
    replace(_BASE, name="no repeated bigram", transform=no_repeat),
    replace(_BASE, name="draft-side stop", stop_draft=unsure, num_drafts=3),
    replace(_BASE, name="EOS", eos=2, max_new_tokens=4),
    replace(_BASE, name="EOS, penalty, stop", eos=1, transform=penalty, stop_draft=unsure),
    replace(_BASE, name="K = 0", num_drafts=0),
    replace(_BASE, name="K = 1", num_drafts=1),
    replace(_BASE, name="K = 3", num_drafts=3),
    replace(_BASE, name="one new token", num_drafts=2, max_new_tokens=1),
    replace(_BASE, name="K = 3, two new tokens", num_drafts=3, max_new_tokens=2),
    replace(_BASE, name="three children", num_children=3),
]
GREEDY_GAMES = [replace(game, name=f"{game.name}, temperature 0", transform=one_hot) for game in GAMES[:1]] + [
    replace(game, name=f"{game.name}, temperature 0", transform=one_hot) for game in GAMES if game.eos is not None
]

LATTICE_CELLS = 4  # the coupled rule needs every p and q on one lattice
LATTICE_GAMES = [
    replace(
        _BASE,
        name="lattice",
        raw_target=on_lattice("target 1", LATTICE_CELLS),
        raw_draft=on_lattice("draft 1", LATTICE_CELLS),
    ),
    replace(
        _BASE,
        name="lattice, EOS",
        raw_target=on_lattice("target 10", LATTICE_CELLS),
        raw_draft=on_lattice("draft 10", LATTICE_CELLS),
        eos=2,
        num_drafts=1,
    ),
    replace(
        _BASE,
        name="lattice, stop",
        raw_target=on_lattice("target 2", LATTICE_CELLS),
        raw_draft=on_lattice("draft 2", LATTICE_CELLS),
        stop_draft=unsure,
    ),
]
