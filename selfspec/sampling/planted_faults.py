"""Wrong acceptance rules, each a mistake that a published decoder has made. The certificate must catch all of them.

They are the negative controls of the exact reference: a check that has never failed proves nothing.
"""

from __future__ import annotations

import math
from fractions import Fraction

from selfspec.sampling.exact import Chance, Distribution, ExactRule, Game, Tokens
from selfspec.sampling.exact_rules import (
    ONE,
    RESIDUAL,
    MemorylessRule,
    argmax,
    best,
    draft_chain,
    norm,
    play_typical,
    residual,
    without,
)


class RejectionVariant:
    """Algorithm 1 with its four ingredients exchangeable, so that each fault is one line."""

    def draft(self, game: Game, prefix: Tokens, chance: Chance) -> tuple[Tokens, list[Distribution]]:
        return draft_chain(game, prefix, chance)

    def tested_q(self, game: Game, path: Tokens, q: Distribution) -> Distribution:
        return q

    def tested_p(self, game: Game, prefix: Tokens, path: Tokens) -> Distribution:
        return game.p(path)

    def correction(self, p: Distribution, q: Distribution, x: int) -> Distribution:
        return residual(p, q)

    def bonus(self, game: Game, path: Tokens) -> Distribution:
        return game.p(path)

    def __call__(self, game: Game, prefix: Tokens, chance: Chance) -> Tokens:
        drafted, qs = self.draft(game, prefix, chance)
        for k, x in enumerate(drafted):
            path = prefix + drafted[:k]
            p, q = self.tested_p(game, prefix, path), self.tested_q(game, path, qs[k])
            if not chance.coin(p[x] / q[x], ("accept", k)):
                return (*drafted[:k], chance.choose(self.correction(p, q, x), RESIDUAL))
        return (*drafted, chance.choose(self.bonus(game, prefix + drafted), RESIDUAL))


class QBeforeTransforms(RejectionVariant):
    """Drafts come from the transformed q, the test divides by the raw one (transformers 47932)."""

    def tested_q(self, game: Game, path: Tokens, q: Distribution) -> Distribution:
        return game.raw_draft(path)


class GreedyDraftTestedAsSampled(RejectionVariant):
    """The draft is argmax q, yet tested as if it had been drawn from q (transformers 32867)."""

    def draft(self, game: Game, prefix: Tokens, chance: Chance) -> tuple[Tokens, list[Distribution]]:
        path, qs = prefix, []
        for _ in range(game.num_drafts):
            qs.append(game.q(path))
            path = (*path, argmax(qs[-1]))
        return path[len(prefix) :], qs


class ResidualBySoftmax(RejectionVariant):
    """max(p - q, 0) goes through a softmax instead of being normalised (transformers 28508)."""

    def correction(self, p: Distribution, q: Distribution, x: int) -> Distribution:
        return norm(tuple(Fraction(math.exp(max(a - b, Fraction(0)))) for a, b in zip(p, q, strict=True)))


class CorrectionFromP(RejectionVariant):
    """After a rejection the token is drawn from p instead of the residual."""

    def correction(self, p: Distribution, q: Distribution, x: int) -> Distribution:
        return p


class BonusFromRawLogits(RejectionVariant):
    """The bonus token comes from the untransformed target."""

    def bonus(self, game: Game, path: Tokens) -> Distribution:
        return game.raw_target(path)


class PenaltiesOfRoundStart(RejectionVariant):
    """Stateful transforms see the round's first prefix at every position (a 'relaxed' penalty)."""

    def tested_p(self, game: Game, prefix: Tokens, path: Tokens) -> Distribution:
        return game.transform(prefix, game.raw_target(path))

    def bonus(self, game: Game, path: Tokens) -> Distribution:
        return game.p(path)


class WithdrawsUnlikelyDrafts(RejectionVariant):
    """The draft stops when the token just drawn was unlikely, and withdraws it: acceptance depends on the stop."""

    def draft(self, game: Game, prefix: Tokens, chance: Chance) -> tuple[Tokens, list[Distribution]]:
        drafted, qs = draft_chain(game, prefix, chance)
        for k, (x, q) in enumerate(zip(drafted, qs, strict=True)):
            if q[x] < Fraction(2, 5):
                return drafted[:k], qs[:k]
        return drafted, qs


def one_uniform_for_stop_and_test(game: Game, prefix: Tokens, chance: Chance) -> Tokens:
    """The draft goes on while u < 1/2, and the same u then tests the draft: acceptance is conditioned on the stop."""
    drafted, qs = draft_chain(game, prefix, chance)
    for k, x in enumerate(drafted):
        p, q = game.p(prefix + drafted[:k]), qs[k]
        if not chance.coin(Fraction(1, 2)):
            drafted = drafted[:k]
            break
        if not chance.coin(2 * p[x] / q[x]):
            return (*drafted[:k], chance.choose(residual(p, q)))
    return (*drafted, chance.choose(game.p(prefix + drafted)))


def one_uniform_per_round(game: Game, prefix: Tokens, chance: Chance) -> Tokens:
    """One uniform tests every draft of the round."""
    drafted, qs = draft_chain(game, prefix, chance)
    below = ONE  # what is known about u
    for k, x in enumerate(drafted):
        p, q = game.p(prefix + drafted[:k]), qs[k]
        h = min(p[x] / q[x], ONE)
        if not chance.coin(min(h / below, ONE)):
            return (*drafted[:k], chance.choose(residual(p, q)))
        below = min(below, h)
    return (*drafted, chance.choose(game.p(prefix + drafted)))


def drafted_eos_is_not_tested(game: Game, prefix: Tokens, chance: Chance) -> Tokens:
    """When the draft says EOS the round ends there, tested or not."""
    drafted, qs = draft_chain(game, prefix, chance)
    for k, x in enumerate(drafted):
        p, q = game.p(prefix + drafted[:k]), qs[k]
        if x != game.eos and not chance.coin(p[x] / q[x]):
            return (*drafted[:k], chance.choose(residual(p, q)))
    return (*drafted, chance.choose(game.p(prefix + drafted)))


def padding_is_accepted(game: Game, prefix: Tokens, chance: Chance) -> Tokens:
    """Behind the last draft lies padding with token 0; it is accepted when 0 is the likeliest token."""
    drafted, qs = draft_chain(game, prefix, chance)
    for k, x in enumerate(drafted):
        p, q = game.p(prefix + drafted[:k]), qs[k]
        if not chance.coin(p[x] / q[x]):
            return (*drafted[:k], chance.choose(residual(p, q)))
    if argmax(game.p(prefix + drafted)) == 0:
        drafted = (*drafted, 0)
    return (*drafted, chance.choose(game.p(prefix + drafted)))


def certain_draft_keeps_its_mass(game: Game, prefix: Tokens, chance: Chance) -> Tokens:
    """A certain draft that was rejected with 1 - p(x) is not taken out of p."""
    path = prefix
    for _ in range(game.num_drafts):
        p, x = game.p(path), argmax(game.q(path))
        if not chance.coin(p[x]):
            return (*path, chance.choose(p))[len(prefix) :]
        path = (*path, x)
    return (*path, chance.choose(game.p(path)))[len(prefix) :]


def block_with_plain_residual(game: Game, prefix: Tokens, chance: Chance) -> Tokens:
    """Block verification that corrects with max(p - q, 0) instead of max(p_i p - q, 0)."""
    drafted, qs = draft_chain(game, prefix, chance)
    mass, end = ONE, 0
    for i in range(1, len(drafted) + 1):
        x = drafted[i - 1]
        mass = min(mass * game.p(prefix + drafted[: i - 1])[x] / qs[i - 1][x], ONE)
        h = mass
        if i < len(drafted):
            p = game.p(prefix + drafted[:i])
            left = sum((max(mass * a - b, Fraction(0)) for a, b in zip(p, qs[i], strict=True)), Fraction(0))
            h = left / (left + 1 - mass) if left + 1 - mass > 0 else ONE
        if chance.coin(h):
            end = i
    p = game.p(prefix + drafted[:end])
    return (*drafted[:end], chance.choose(p if end == len(drafted) else residual(p, qs[end])))


def block_that_stops_at_the_first_failure(game: Game, prefix: Tokens, chance: Chance) -> Tokens:
    """Block verification tested in order, as if it were plain rejection."""
    drafted, qs = draft_chain(game, prefix, chance)
    mass = ONE
    for i in range(1, len(drafted) + 1):
        p, x = game.p(prefix + drafted[: i - 1]), drafted[i - 1]
        before, mass = mass, min(mass * p[x] / qs[i - 1][x], ONE)
        if not chance.coin(mass):
            difference = tuple(max(before * a - b, Fraction(0)) for a, b in zip(p, qs[i - 1], strict=True))
            return (*drafted[: i - 1], chance.choose(difference if any(difference) else p))
    return (*drafted, chance.choose(game.p(prefix + drafted)))


def without_replacement_by_stale_q(game: Game, prefix: Tokens, chance: Chance) -> Tokens:
    """Children are drawn without replacement, but tested against the q that was not renormalised."""
    path = prefix
    for _ in range(game.num_drafts):
        p, q = game.p(path), game.q(path)
        rest = q
        for _ in range(game.num_children):
            if not any(rest):
                break
            x = chance.choose(rest)
            rest = without(rest, x)
            if chance.coin(p[x] / q[x]):
                path = (*path, x)
                break
            p = residual(p, q)
            q = tuple(Fraction(0) if v == x else mass for v, mass in enumerate(q))
        else:
            return (*path, chance.choose(p))[len(prefix) :]
    return (*path, chance.choose(game.p(path)))[len(prefix) :]


def likeliest_children_tested_by_q(game: Game, prefix: Tokens, chance: Chance) -> Tokens:
    """Children are the likeliest under q, without randomness, yet tested with q(x) (EAGLE 183)."""
    path = prefix
    for _ in range(game.num_drafts):
        p, q = game.p(path), game.q(path)
        for x in best(q, game.num_children):
            if chance.coin(p[x] / q[x]):
                path = (*path, x)
                break
            p, q = residual(p, q), without(q, x)
        else:
            return (*path, chance.choose(p))[len(prefix) :]
    return (*path, chance.choose(game.p(path)))[len(prefix) :]


def fresh_draw_per_child(game: Game, prefix: Tokens, chance: Chance) -> Tokens:
    """Exact match against several candidates, the target drawing anew for each of them (fms-extras 12)."""
    path = prefix
    for _ in range(game.num_drafts):
        p = game.p(path)
        for x in best(game.q(path), game.num_children):
            y = chance.choose(p)
            if y == x:
                path = (*path, x)
                break
        else:
            return (*path, y)[len(prefix) :]
    return (*path, chance.choose(game.p(path)))[len(prefix) :]


FAULTS: list[ExactRule] = [
    MemorylessRule("q taken before transforms", QBeforeTransforms()),
    MemorylessRule("greedy draft verified as sampled", GreedyDraftTestedAsSampled()),
    MemorylessRule("residual by softmax", ResidualBySoftmax()),
    MemorylessRule("correction token from p", CorrectionFromP()),
    MemorylessRule("bonus token from untransformed logits", BonusFromRawLogits()),
    MemorylessRule("penalties of the round's start", PenaltiesOfRoundStart()),
    MemorylessRule("acceptance conditioned on the stop: draft withdrawn", WithdrawsUnlikelyDrafts()),
    MemorylessRule("acceptance conditioned on the stop: one uniform", one_uniform_for_stop_and_test),
    MemorylessRule("one uniform for the whole round", one_uniform_per_round),
    MemorylessRule("drafted EOS not tested", drafted_eos_is_not_tested),
    MemorylessRule("padding accepted", padding_is_accepted),
    MemorylessRule("certain draft keeps its mass", certain_draft_keeps_its_mass),
    MemorylessRule("block: residual of plain rejection", block_with_plain_residual),
    MemorylessRule("block: stops at the first failure", block_that_stops_at_the_first_failure),
    MemorylessRule("without replacement by un-renormalised q", without_replacement_by_stale_q),
    MemorylessRule("likeliest children tested by q", likeliest_children_tested_by_q),
    MemorylessRule("fresh target draw per child", fresh_draw_per_child),
    MemorylessRule("typical acceptance said to be lossless", play_typical),
]
