"""The shipped acceptance rules again, in fractions: what `acceptance/` computes on a device, in a form to enumerate.

Every function follows the same source as its device counterpart and names the uniform behind each decision, ("accept",
k) and so on, so that `exact_device` can replay each branch on the device code. Cost: see `exact`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from fractions import Fraction

from selfspec.sampling.exact import Chance, Distribution, ExactRule, Game, Tokens

ONE = Fraction(1)
RESIDUAL = ("residual",)


@dataclass(frozen=True)
class MemorylessRule:
    """A rule whose rounds share nothing: a name and one function."""

    name: str
    play: Callable[[Game, Tokens, Chance], Tokens] = field(repr=False)

    def round(self, game: Game, prefix: Tokens, memory: Hashable, chance: Chance) -> tuple[Tokens, Hashable]:
        return self.play(game, prefix, chance), None


def draft_chain(game: Game, prefix: Tokens, chance: Chance) -> tuple[Tokens, list[Distribution]]:
    """Draw drafts from q until the draft stops itself or K are drawn."""
    path, qs = prefix, []
    for k in range(game.num_drafts):
        q = game.q(path)
        if game.stop_draft(path, q):
            break
        path = (*path, chance.choose(q, ("draft", k)))
        qs.append(q)
    return path[len(prefix) :], qs


def norm(weights: Distribution) -> Distribution:
    total = sum(weights, Fraction(0))
    return tuple(w / total for w in weights)


def residual(p: Distribution, q: Distribution) -> Distribution:
    """norm(max(p - q, 0)), or p where that is empty."""
    difference = tuple(max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True))
    return norm(difference) if any(difference) else p


def without(q: Distribution, x: int) -> Distribution:
    """q with x taken out and renormalised; all zeros when x was all there was."""
    rest = tuple(Fraction(0) if v == x else mass for v, mass in enumerate(q))
    return norm(rest) if any(rest) else rest


def argmax(weights: Distribution) -> int:
    return max(range(len(weights)), key=lambda v: (weights[v], -v))


def best(weights: Distribution, count: int) -> list[int]:
    """The `count` most likely possible tokens, ties to the smaller id."""
    order = sorted(range(len(weights)), key=lambda v: (-weights[v], v))
    return [v for v in order[:count] if weights[v] > 0]


def play_greedy(game: Game, prefix: Tokens, chance: Chance) -> Tokens:
    """Certain drafts (argmax q), accepted while they are argmax p. Exact where p is one-hot."""
    path = prefix
    for _ in range(game.num_drafts):
        draft, choice = argmax(game.q(path)), argmax(game.p(path))
        path = (*path, choice)
        if draft != choice:
            return path[len(prefix) :]
    return (*path, argmax(game.p(path)))[len(prefix) :]


def play_rejection(game: Game, prefix: Tokens, chance: Chance) -> Tokens:
    drafted, qs = draft_chain(game, prefix, chance)
    for k, (x, q) in enumerate(zip(drafted, qs, strict=True)):
        p = game.p(prefix + drafted[:k])
        if not chance.coin(p[x] / q[x], ("accept", k)):
            return (*drafted[:k], chance.choose(residual(p, q), RESIDUAL))
    return (*drafted, chance.choose(game.p(prefix + drafted), RESIDUAL))


def play_rejection_certain(game: Game, prefix: Tokens, chance: Chance) -> Tokens:
    """Drafts without randomness (q one-hot): accept with p(x), else p without x."""
    path = prefix
    for k in range(game.num_drafts):
        p, q = game.p(path), game.q(path)
        if game.stop_draft(path, q):
            break
        x = argmax(q)
        if not chance.coin(p[x], ("accept", k)):
            return (*path, chance.choose(without(p, x), RESIDUAL))[len(prefix) :]
        path = (*path, x)
    return (*path, chance.choose(game.p(path), RESIDUAL))[len(prefix) :]


def play_block(game: Game, prefix: Tokens, chance: Chance) -> Tokens:
    drafted, qs = draft_chain(game, prefix, chance)
    mass, end, end_mass = ONE, 0, ONE
    for i in range(1, len(drafted) + 1):
        x = drafted[i - 1]
        mass = min(mass * game.p(prefix + drafted[: i - 1])[x] / qs[i - 1][x], ONE)
        if i == len(drafted):
            h = mass
        else:
            p = game.p(prefix + drafted[:i])
            left = sum((max(mass * a - b, Fraction(0)) for a, b in zip(p, qs[i], strict=True)), Fraction(0))
            h = left / (left + 1 - mass) if left + 1 - mass > 0 else ONE
        if chance.coin(h, ("accept", i - 1)):
            end, end_mass = i, mass
    p = game.p(prefix + drafted[:end])
    if end == len(drafted):
        return (*drafted, chance.choose(p, RESIDUAL))
    scaled = tuple(end_mass * mass_v for mass_v in p)
    difference = tuple(max(a - b, Fraction(0)) for a, b in zip(scaled, qs[end], strict=True))
    return (*drafted[:end], chance.choose(difference if any(difference) else p, RESIDUAL))


def play_tree_without_replacement(game: Game, prefix: Tokens, chance: Chance) -> Tokens:
    """Recursive rejection. Children are drawn when the walk arrives: those of other nodes cannot matter."""
    path = prefix
    for level in range(game.num_drafts):
        p, q = game.p(path), game.q(path)
        if game.stop_draft(path, q):
            break
        children: list[int] = []
        rest = q
        while len(children) < game.num_children and any(rest):
            children.append(chance.choose(rest, ("child", level, len(children))))
            rest = without(rest, children[-1])
        for c, x in enumerate(children):
            if chance.coin(p[x] / q[x], ("accept", level, c)):
                path = (*path, x)
                break
            p, q = residual(p, q), without(q, x)
        else:
            return (*path, chance.choose(p, RESIDUAL))[len(prefix) :]
    return (*path, chance.choose(game.p(path), RESIDUAL))[len(prefix) :]


def play_tree_certain(game: Game, prefix: Tokens, chance: Chance) -> Tokens:
    """Children without randomness (the likeliest under q): accept x with p'(x), else take x out and renormalise."""
    path = prefix
    for level in range(game.num_drafts):
        p, q = game.p(path), game.q(path)
        if game.stop_draft(path, q):
            break
        for c, x in enumerate(best(q, game.num_children)):
            if chance.coin(p[x], ("accept", level, c)):
                path = (*path, x)
                break
            p = without(p, x)
        else:
            return (*path, chance.choose(p, RESIDUAL))[len(prefix) :]
    return (*path, chance.choose(game.p(path), RESIDUAL))[len(prefix) :]


def play_tree_follow(game: Game, prefix: Tokens, chance: Chance) -> Tokens:
    """The same by drawing y ~ p and following the child that holds y: the form that runs on the device."""
    path = prefix
    for level in range(game.num_drafts + 1):
        p, q = game.p(path), game.q(path)
        y = chance.choose(p, ("level", level))
        at_leaf = level == game.num_drafts or game.stop_draft(path, q)
        path = (*path, y)
        if at_leaf or y not in best(q, game.num_children):
            break
    return path[len(prefix) :]


def play_typical(game: Game, prefix: Tokens, chance: Chance) -> Tokens:
    """Lossy: accept the likeliest draft while p(x) > min(epsilon, delta exp(-H))."""
    path = prefix
    for _ in range(game.num_drafts):
        p, q = game.p(path), game.q(path)
        if game.stop_draft(path, q):
            break
        entropy = -sum(float(mass) * math.log(mass) for mass in p if mass > 0)
        x = argmax(q)
        if not float(p[x]) > min(0.09, 0.3 * math.exp(-entropy)):
            break
        path = (*path, x)
    return (*path, chance.choose(game.p(path), RESIDUAL))[len(prefix) :]


class Coupled:
    """Noise by absolute position, shared by target and drafter and kept between rounds: here a uniform on a lattice of
    `cells`, turned into a token by inverse CDF (any way of drawing from p will do). All p and q must lie on it.
    """

    name = "coupled"

    def __init__(self, cells: int) -> None:
        self.cells = cells

    def round(self, game: Game, prefix: Tokens, memory: Hashable, chance: Chance) -> tuple[Tokens, Hashable]:
        noise: list[int] = list(memory) if isinstance(memory, tuple) else []

        def own_draw(distribution: Distribution, position: int) -> int:
            while len(noise) <= position:
                noise.append(chance.choose((Fraction(1, self.cells),) * self.cells))
            below = Fraction(0)
            for token, mass in enumerate(distribution):
                below += mass
                if Fraction(noise[position], self.cells) < below:
                    return token
            raise AssertionError("a distribution sums to one")

        drafted: Tokens = ()
        for _ in range(game.num_drafts):
            path = prefix + drafted
            if game.stop_draft(path, game.q(path)):
                break
            drafted = (*drafted, own_draw(game.q(path), len(path)))
        emitted: Tokens = ()
        for k in range(len(drafted) + 1):
            emitted = (*emitted, own_draw(game.p(prefix + emitted), len(prefix) + k))
            if emitted != drafted[: k + 1]:
                break
        return emitted, tuple(noise)


LOSSLESS: list[ExactRule] = [
    MemorylessRule("rejection", play_rejection),
    MemorylessRule("rejection, certain drafts", play_rejection_certain),
    MemorylessRule("block", play_block),
    MemorylessRule("tree, without replacement", play_tree_without_replacement),
    MemorylessRule("tree, certain children", play_tree_certain),
    MemorylessRule("tree, follow own draw", play_tree_follow),
]
GREEDY: ExactRule = MemorylessRule("greedy", play_greedy)
TYPICAL: ExactRule = MemorylessRule("typical", play_typical)
