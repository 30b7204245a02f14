"""The device code against the exact reference: every branch of the enumeration replayed on tensors, in float64.

A branch of an exact rule is a box of uniforms: each of its choices was made because one uniform lay in one interval.
The device rule gets the same drafts, p and q, and uniforms just inside the corners of that box; it must emit exactly
the branch's tokens. The boxes of all branches fill the space of uniforms, and a rule compares each uniform with
thresholds, so agreement at the corners means agreement everywhere but within 1e-9 of the thresholds.

Cost: one batch of (branches x corners) rows per game.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from selfspec.sampling.acceptance.block import accept_block
from selfspec.sampling.acceptance.greedy import accept_greedy
from selfspec.sampling.acceptance.rejection import accept_rejection
from selfspec.sampling.acceptance.tree import (
    Tree,
    TreeVerdict,
    accept_certain,
    accept_without_replacement,
    draw_without_replacement,
)
from selfspec.sampling.acceptance.typical import accept_typical
from selfspec.sampling.acceptance.verdict import Verdict
from selfspec.sampling.distribution import draw
from selfspec.sampling.exact import Branch, Chance, Choice, Distribution, Game, Tokens, branches
from selfspec.sampling.exact_rules import (
    RESIDUAL,
    argmax,
    best,
    play_block,
    play_greedy,
    play_rejection,
    play_rejection_certain,
    play_tree_follow,
    play_tree_without_replacement,
    play_typical,
)

# drafted [B, K], q [B, K, V] or None, num_drafted [B], logits [B, K + 1, V], uniforms [B, K] and [B]
ChainRule = Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor], Verdict]
INSIDE = 1e-9


@dataclass(frozen=True)
class Replay:
    """How many branches were replayed at how many corners, and those that came out differently."""

    name: str
    num_branches: int
    num_corners: int
    mismatches: list[str]


def corners(branch: Branch[Tokens]) -> list[dict[Hashable, float]]:
    """A value for every uniform of the branch, just inside corners of its box: all of them up to 4 dimensions, then the
    two extreme ones and their neighbours."""
    slots = [choice.slot for choice in branch.choices]
    ends = [_ends(choice) for choice in branch.choices]
    n = len(ends)
    if n <= 4:
        picks = list(itertools.product((0, 1), repeat=n))
    else:
        picks = [tuple(side ^ (i == flipped) for i in range(n)) for side in (0, 1) for flipped in range(-1, n)]
    return [{slot: end[side] for slot, end, side in zip(slots, ends, pick, strict=True)} for pick in picks]


def replay_chain(name: str, game: Game, play: Callable[[Game, Tokens, Chance], Tokens], rule: ChainRule) -> Replay:
    """Replay one round from the empty output. Certain drafts are recognised by having no ("draft", k) choices."""
    K, V = game.num_drafts, game.vocab_size
    found = list(branches(lambda chance: play(game, (), chance)))
    certain = not any(choice.slot == ("draft", 0) for branch in found for choice in branch.choices)
    drafted_BK, num_drafted_B, q_BKV, logits_BTV, u_accept_BK, u_residual_B, expected = [], [], [], [], [], [], []
    for branch in found:
        drafted = _certain_path(game) if certain else _indices(branch, "draft")
        padded = drafted + (V - 1,) * (K - len(drafted))
        p_TV = [_row(game.p(drafted[:k])) for k in range(len(drafted) + 1)]
        q_KV = [_row(game.q(drafted[:k])) for k in range(len(drafted))]
        for corner in corners(branch):
            drafted_BK.append(padded)
            num_drafted_B.append(len(drafted))
            logits_BTV.append(p_TV + [[1 / V] * V] * (K - len(drafted)))
            q_BKV.append(q_KV + [[1 / V] * V] * (K - len(drafted)))
            u_accept_BK.append([corner.get(("accept", k), 0.5) for k in range(K)])
            u_residual_B.append(corner.get(RESIDUAL, 0.5))
            expected.append(branch.result)
    B = len(expected)
    verdict = rule(
        torch.tensor(drafted_BK, dtype=torch.int64).reshape(B, K),
        None if certain else _double(q_BKV).reshape(B, K, V),
        torch.tensor(num_drafted_B),
        _double(logits_BTV).log(),
        _double(u_accept_BK).reshape(B, K),
        _double(u_residual_B),
    )
    emitted = [
        (*tokens[:count], token)
        for tokens, count, token in zip(
            drafted_BK, verdict.num_accepted_B.tolist(), verdict.next_token_B.tolist(), strict=True
        )
    ]
    return _replay(f"{name}: {game.name}", len(found), expected, emitted, verdict.error_B)


def replay_tree(name: str, game: Game, play: Callable[[Game, Tokens, Chance], Tokens], drawn: bool) -> Replay:
    """Replay one round of a tree: the children along the walked path, drawn without replacement or certain."""
    D, C, V = game.num_drafts, game.num_children, game.vocab_size
    N = 1 + D * C
    found = list(branches(lambda chance: play(game, (), chance)))
    trees: list[tuple[list[int], list[list[int]], list[list[float]], list[list[float]]]] = []
    u_accept: list[list[list[float]] | list[float]] = []
    u_last, expected, redrawn = [], [], []
    for branch in found:
        path, node = branch.result, 0
        tokens, children = [0] * N, [[0] * C for _ in range(N)]
        p_NV, q_NV = [[1 / V] * V for _ in range(N)], [[1 / V] * V for _ in range(N)]
        for level in range(len(path)):
            p_NV[node], q = _row(game.p(path[:level])), game.q(path[:level])
            q_NV[node] = _row(q)
            if level == D or game.stop_draft(path[:level], q):
                break
            drafted = _indices(branch, ("child", level)) if drawn else tuple(best(q, C))
            for c, token in enumerate(drafted):
                tokens[1 + level * C + c], children[node][c] = token, 1 + level * C + c
            if path[level] not in drafted or level + 1 == len(path):
                break
            node = 1 + level * C + drafted.index(path[level])
        for corner in corners(branch):
            trees.append((tokens, children, p_NV, q_NV))
            if drawn:
                u_accept.append([[corner.get(("accept", d, c), 0.5) for c in range(C)] for d in range(D)])
                u_last.append(corner.get(RESIDUAL, 0.5))
                redrawn.append(([corner.get(("child", 0, c), 0.5) for c in range(C)], _indices(branch, ("child", 0))))
            else:
                u_accept.append([corner.get(("level", d), 0.5) for d in range(D + 1)])
            expected.append(path)
    B = len(expected)
    tokens_BN, children_BNC = torch.tensor([t[0] for t in trees]), torch.tensor([t[1] for t in trees])
    q_BNV = _double([t[3] for t in trees]) if drawn else None
    tree = Tree(tokens_BN, children_BNC, D, q_BNV)
    logits_BNV = _double([t[2] for t in trees]).log()
    verdict: TreeVerdict
    if q_BNV is not None:
        verdict = accept_without_replacement(tree, logits_BNV, _double(u_accept).reshape(B, D, C), _double(u_last))
    else:
        verdict = accept_certain(tree, logits_BNV, _double(u_accept))
    emitted = []
    for b in range(B):
        nodes = [node for node in verdict.path_BD[b].tolist() if node > 0]
        emitted.append((*tokens_BN[b, nodes].tolist(), int(verdict.next_token_B[b])))
    replay = _replay(f"{name}: {game.name}", len(found), expected, emitted, verdict.error_B)
    if q_BNV is not None and D > 0:
        drawn_BC, exist_BC = draw_without_replacement(q_BNV[:, 0], _double([u for u, _ in redrawn]))
        for b, (_, children_of_root) in enumerate(redrawn):
            got = tuple(drawn_BC[b][exist_BC[b]].tolist())
            if children_of_root and got != children_of_root:
                replay.mismatches.append(f"children drawn: {got} instead of {children_of_root}")
    return replay


def replay_draw(distributions: Sequence[Distribution]) -> Replay:
    """`draw` at both ends of every token's interval."""
    expected, weights_BV, u_B = [], [], []
    for weights in distributions:
        for token, mass in enumerate(weights):
            if mass > 0:
                for u in _ends(Choice(weights, token, None)):
                    expected.append((token,))
                    weights_BV.append(_row(weights))
                    u_B.append(u)
    emitted = [(token,) for token in draw(_double(weights_BV), _double(u_B)).tolist()]
    return _replay("inverse-CDF draw", len(distributions), expected, emitted, torch.zeros(len(expected)))


def replay_all(games: Sequence[Game], greedy_games: Sequence[Game]) -> list[Replay]:
    """Everything shipped, over all games that differ in their first round."""
    chain_rules: list[tuple[str, Callable[[Game, Tokens, Chance], Tokens], ChainRule]] = [
        ("rejection", play_rejection, accept_rejection),
        ("rejection, certain drafts", play_rejection_certain, accept_rejection),
        ("block", play_block, accept_block),
        ("typical", play_typical, lambda x, q, n, logits, u, last: accept_typical(x, n, logits, last)),
    ]
    games = distinct(games)
    replays = [replay_chain(name, game, play, rule) for name, play, rule in chain_rules for game in games]
    replays += [
        replay_chain("greedy", game, play_greedy, lambda x, q, n, logits, u, last: accept_greedy(x, n, logits))
        for game in greedy_games
    ]
    replays += [replay_tree("tree, without replacement", g, play_tree_without_replacement, True) for g in games]
    replays += [replay_tree("tree, follow own draw", g, play_tree_follow, False) for g in games]
    return [*replays, replay_draw([game.p(()) for game in games] + [game.q(()) for game in games])]


def distinct(games: Sequence[Game]) -> list[Game]:
    """One game of each kind of first round: a replay sees neither EOS nor the length."""
    rounds = {(g.raw_target, g.raw_draft, g.transform, g.num_drafts, g.num_children, g.stop_draft): g for g in games}
    return list(rounds.values())


def _certain_path(game: Game) -> Tokens:
    path: Tokens = ()
    while len(path) < game.num_drafts and not game.stop_draft(path, game.q(path)):
        path = (*path, argmax(game.q(path)))
    return path


def _indices(branch: Branch[Tokens], kind: str | tuple[str, int]) -> Tokens:
    head = (kind,) if isinstance(kind, str) else kind
    return tuple(c.index for c in branch.choices if isinstance(c.slot, tuple) and c.slot[: len(head)] == head)


def _ends(choice: Choice) -> tuple[float, float]:
    low, high = choice.interval
    inside = min(Fraction(INSIDE), (high - low) / 4)
    return float(low + inside), float(high - inside)


def _row(distribution: Distribution) -> list[float]:
    return [float(mass) for mass in distribution]


def _double(values: Sequence[object]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _replay(
    name: str, num_branches: int, expected: Sequence[object], emitted: Sequence[Tokens], error_B: Tensor
) -> Replay:
    mismatches = [f"{got} instead of {want}" for got, want in zip(emitted, expected, strict=True) if got != want]
    mismatches += [f"error code {code}" for code in sorted(set(error_B.tolist())) if code != 0]
    return Replay(name, num_branches, len(expected), mismatches)
