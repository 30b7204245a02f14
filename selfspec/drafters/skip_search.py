"""Which layers to skip, by dynamic programming over hidden states: CLaSp and the knapsack of KnapSpec.

CLaSp (Chen et al. 2025, arXiv 2505.24196, section 3): let h_i be the target's own hidden state after layer i. The best
state after i layers with j of them skipped is, of running layer i and skipping it, the one that points more like h_i:

    g(i, j) = argmax cos(g, h_i)  over  g in { f_i(g(i-1, j)), g(i-1, j-1) },      g(0, 0) = h_0

KnapSpec (2026, arXiv 2602.20217) has the same recurrence over sublayers with integer costs w_i: skipping i comes
from g(i-1, j - w_i), so j counts the time saved, and each j ends in the best set that saves it. CLaSp is the case of
equal costs. Both keep one state per (i, j): the optimum where layers do not interact, a heuristic elsewhere. Neither
says which j to take; the searches take the one with the most tokens per second (`selfspec.measure.skip_speed`).

Cost: every layer once, on (budget + 1) states of N tokens. Shape letters: W budgets 0..budget, N tokens, M width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

Item = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Skipped:
    """The best way to skip items of a total cost."""

    items: tuple[int, ...]
    cosine: float  # of its last state to the target's, averaged over the tokens


def best_skips(
    run: Sequence[Item],
    truth: Sequence[Tensor],
    costs: Sequence[int],
    budget: int,
    may_skip: Sequence[bool] | None = None,
    least: float = -1.0,
) -> list[Skipped | None]:
    """For each total cost 0..budget the items to skip; None where no choice has that cost.

    run[i]: item i on states `[W, N, M]`, every one of the W branches by itself. truth: the target's states `[N, M]`,
    before item 0 and after each item. least: a state whose cosine is below this is given up (KnapSpec: 0.5).
    """
    num, tokens = len(run), truth[0].shape[0]
    assert len(truth) == num + 1 and len(costs) == num and all(cost > 0 for cost in costs)
    states_WNM = truth[0].expand(budget + 1, *truth[0].shape).contiguous()
    cosine_W = states_WNM.new_full((budget + 1,), -torch.inf, dtype=torch.float32)
    cosine_W[0] = 1.0
    skipped = []  # per item, for which budgets it was skipped
    for item in range(num):
        ran_WNM, ran_W = run[item](states_WNM), torch.full_like(cosine_W, -torch.inf)
        known_W = cosine_W > -torch.inf
        ran_W[known_W] = mean_cosine(ran_WNM[known_W], truth[item + 1])
        left_W = torch.full_like(cosine_W, -torch.inf)  # of the state that skipping comes from
        left_WNM, cost = states_WNM, costs[item]
        if cost <= budget and (may_skip is None or may_skip[item]):
            left_WNM = states_WNM.roll(cost, 0)
            from_W = torch.cat([torch.zeros_like(known_W[:cost]), known_W[: budget + 1 - cost]])
            left_W[from_W] = mean_cosine(left_WNM[from_W], truth[item + 1])
        skip_W = left_W > ran_W
        skipped.append(skip_W)
        states_WNM = torch.where(skip_W[:, None, None], left_WNM, ran_WNM)
        cosine_W = torch.maximum(left_W, ran_W)
        cosine_W[cosine_W < least] = -torch.inf
    assert states_WNM.shape[1] == tokens
    took = torch.stack(skipped).tolist()  # the one host read
    found: list[Skipped | None] = []
    for total, cosine in enumerate(cosine_W.tolist()):
        found.append(None if cosine == -torch.inf else Skipped(walk_back(took, costs, total), cosine))
    return found


def walk_back(took: Sequence[Sequence[bool]], costs: Sequence[int], total: int) -> tuple[int, ...]:
    """The items skipped on the way to `total`."""
    items, left = list[int](), total
    for item in reversed(range(len(took))):
        if took[item][left]:
            items.append(item)
            left -= costs[item]
    assert left == 0
    return tuple(reversed(items))


def mean_cosine(states_WNM: Tensor, truth_NM: Tensor) -> Tensor:
    """float32 `[W]`: cosine to the truth, averaged over the tokens."""
    return F.cosine_similarity(states_WNM.float(), truth_NM.float(), dim=-1).mean(-1)
