"""The exact reference: every random choice of a decoder over a small vocabulary, enumerated in fractions.

A rule is ordinary Python that asks `Chance` for its randomness. `branches` runs it once per possible sequence of
answers and multiplies their probabilities; `output_distribution` chains rounds, trims at EOS and at the length, and
returns the distribution of finished outputs. It must equal `target_distribution` as fractions, without tolerance.

A rule of your own is any object with the two members of `ExactRule`. A rule that keeps something between rounds (noise
by position, an adaptive draft length) keeps it in `memory`.

Cost: (choices per round) x (distinct outputs so far); milliseconds for 3 tokens, 2 drafts and 3 new tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Generic, Protocol, TypeVar

Tokens = tuple[int, ...]
Distribution = tuple[Fraction, ...]
Model = Callable[[Tokens], Distribution]
Outputs = dict[Tokens, Fraction]
T = TypeVar("T")


@dataclass(frozen=True)
class Game:
    """What is decoded: raw models, the transform both pass through, draft length, when the draft stops, when all does.

    stop_draft(path, next_q) is asked at every node of the draft, before drawing from next_q.
    """

    name: str
    vocab_size: int
    raw_target: Model
    raw_draft: Model
    transform: Callable[[Tokens, Distribution], Distribution] = lambda prefix, raw: raw
    num_drafts: int = 2
    num_children: int = 2
    max_new_tokens: int = 3
    eos: int | None = None
    stop_draft: Callable[[Tokens, Distribution], bool] = lambda path, next_q: False

    def p(self, prefix: Tokens) -> Distribution:
        return _transformed(self.transform, self.raw_target, prefix)

    def q(self, prefix: Tokens) -> Distribution:
        return _transformed(self.transform, self.raw_draft, prefix)


@functools.cache
def _transformed(
    transform: Callable[[Tokens, Distribution], Distribution], model: Model, prefix: Tokens
) -> Distribution:
    return transform(prefix, model(prefix))


@dataclass(frozen=True)
class Choice:
    """One answer: which index, of which normalised weights, decided by the uniform named `slot`."""

    weights: Distribution
    index: int
    slot: Hashable

    @property
    def interval(self) -> tuple[Fraction, Fraction]:
        """Where the uniform lies when an inverse CDF makes this choice."""
        low = sum(self.weights[: self.index], Fraction(0))
        return low, low + self.weights[self.index]


class Chance:
    """Hands out the answers of one branch: those of the script first, then the first possible ones."""

    def __init__(self, script: Sequence[Choice] = ()) -> None:
        self._script = script
        self.log: list[Choice] = []

    def choose(self, weights: Sequence[Fraction], slot: Hashable = None) -> int:
        """Index i with probability weights[i] / sum(weights). `slot` names the uniform, for replays on a device."""
        position = len(self.log)
        if position < len(self._script):
            choice = self._script[position]
        else:
            total = sum(weights, Fraction(0))
            if total <= 0 or min(weights) < 0:
                raise ValueError(f"cannot choose by weights {[str(w) for w in weights]}")
            normalised = tuple(weights) if total == 1 else tuple(w / total for w in weights)
            choice = Choice(normalised, next(i for i, w in enumerate(weights) if w > 0), slot)
        self.log.append(choice)
        return choice.index

    def coin(self, probability: Fraction, slot: Hashable = None) -> bool:
        """True with the given probability, clamped to [0, 1]; decided by u < probability."""
        probability = min(max(probability, Fraction(0)), Fraction(1))
        return self.choose((probability, 1 - probability), slot) == 0


class ExactRule(Protocol):
    """What third parties implement: a round, from the output so far to the tokens it adds (never none) and memory."""

    @property
    def name(self) -> str: ...

    def round(self, game: Game, prefix: Tokens, memory: Hashable, chance: Chance) -> tuple[Tokens, Hashable]: ...


@dataclass(frozen=True)
class Branch(Generic[T]):
    probability: Fraction
    result: T
    choices: tuple[Choice, ...]


def branches(play: Callable[[Chance], T]) -> Iterator[Branch[T]]:
    """Every way `play` can go: depth-first over its choices, replaying each prefix of answers."""
    pending: list[tuple[list[Choice], Fraction]] = [([], Fraction(1))]
    while pending:
        script, probability = pending.pop()
        chance = Chance(script)
        result = play(chance)
        for position in range(len(script), len(chance.log)):
            choice = chance.log[position]
            for other in range(choice.index + 1, len(choice.weights)):
                if choice.weights[other] > 0:
                    answers = [*chance.log[:position], replace(choice, index=other)]
                    pending.append((answers, probability * choice.weights[other]))
            probability *= choice.weights[choice.index]
        yield Branch(probability, result, tuple(chance.log))


def output_distribution(rule: ExactRule, game: Game) -> Outputs:
    """The distribution of finished outputs (trimmed at EOS and max_new_tokens) that the rule produces."""
    finished: Outputs = {}
    running: dict[tuple[Tokens, Hashable], Fraction] = {((), None): Fraction(1)}
    while running:
        following: dict[tuple[Tokens, Hashable], Fraction] = {}
        for (prefix, memory), probability in running.items():
            for branch in branches(functools.partial(rule.round, game, prefix, memory)):
                emitted, kept = branch.result
                if not emitted:
                    raise ValueError(
                        f"rule {rule.name}: a round added no token after {prefix}; it must add at least one"
                    )
                output, done = trim(game, prefix + tuple(emitted))
                mass = probability * branch.probability
                if done:
                    finished[output] = finished.get(output, Fraction(0)) + mass
                else:
                    following[output, kept] = following.get((output, kept), Fraction(0)) + mass
        running = following
    return finished


def target_distribution(game: Game) -> Outputs:
    """The distribution of finished outputs of autoregressive sampling from p."""
    finished: Outputs = {}
    running: Outputs = {(): Fraction(1)}
    while running:
        prefix, probability = running.popitem()
        for token, mass in enumerate(game.p(prefix)):
            if mass > 0:
                output, done = trim(game, (*prefix, token))
                (finished if done else running)[output] = probability * mass
    return finished


def trim(game: Game, output: Tokens) -> tuple[Tokens, bool]:
    """Cut right behind the first EOS, and at the length; True when nothing may follow."""
    if game.eos is not None and game.eos in output:
        output = output[: output.index(game.eos) + 1]
    output = output[: game.max_new_tokens]
    return output, len(output) == game.max_new_tokens or (game.eos is not None and output[-1] == game.eos)


def total_variation(one: Outputs, other: Outputs) -> Fraction:
    """Half the summed absolute difference; 0 exactly when the two are the same."""
    keys = one.keys() | other.keys()
    return sum((abs(one.get(k, Fraction(0)) - other.get(k, Fraction(0))) for k in keys), Fraction(0)) / 2


def expected_emitted(rule: ExactRule, game: Game, prefix: Tokens = ()) -> Fraction:
    """Expected tokens of one round, before trimming: the exact acceptance length of the first verify pass."""
    total = Fraction(0)
    for branch in branches(functools.partial(rule.round, game, prefix, None)):
        total += branch.probability * len(branch.result[0])
    return total
