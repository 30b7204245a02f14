"""The dynamic programs find what they say: the published recurrence; and the best of all sets, where that can be."""

from __future__ import annotations

import itertools

import pytest
import torch

from selfspec.drafters.skip_search import best_skips, mean_cosine


def random_layers(num: int, width: int, seed: int, strength: float = 0.7):
    """Residual layers that differ in how much they turn their input."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(width, width, generator=generator, dtype=torch.float64) for _ in range(num)]
    return [lambda x, w=w: x + strength * torch.tanh(x @ w / width**0.5) for w in weights], generator


def states_of(layers, start):
    states = [start]
    for layer in layers:
        states.append(layer(states[-1]))
    return states


def written_out(layers, truth, costs, budget, may_skip):
    """g(i, j) by its definition, one state at a time: {j: (state, skipped items)}."""
    best = {0: (truth[0], ())}
    for i, layer in enumerate(layers):
        following = {}
        for j in range(budget + 1):
            options = []
            if j in best:
                options.append((layer(best[j][0][None])[0], best[j][1]))
            if may_skip[i] and j - costs[i] in best:
                options.append((best[j - costs[i]][0], (*best[j - costs[i]][1], i)))
            if options:
                following[j] = max(options, key=lambda one: float(mean_cosine(one[0][None], truth[i + 1])[0]))
        best = following
    return {j: items for j, (_, items) in best.items()}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("costs", [[1] * 7, [3, 5, 3, 5, 3, 5, 2]], ids=["CLaSp", "knapsack"])
def test_it_is_the_published_recurrence(costs, seed):
    layers, generator = random_layers(7, 6, seed)
    truth = states_of(layers, torch.randn(3, 6, generator=generator, dtype=torch.float64))
    may_skip = [False, *[True] * 5, seed % 2 == 0]
    budget = sum(costs) // 2
    found = best_skips(layers, truth, costs, budget, may_skip)
    expected = written_out(layers, truth, costs, budget, may_skip)
    assert {j: one.items for j, one in enumerate(found) if one is not None} == expected
    assert found[0].items == () and found[0].cosine == pytest.approx(1.0)
    for one in filter(None, found):
        state = truth[0]
        for i, layer in enumerate(layers):
            state = state if i in one.items else layer(state[None])[0]
        assert one.cosine == pytest.approx(float(mean_cosine(state[None], truth[-1])[0])), "as the set really ends"


def additive_layers(num: int, seed: int):
    """Each layer adds its own direction: then a set's cosine to the truth is sqrt of what it keeps of the squared sum,
    no choice changes what another brings, and the recurrence must find the optimum.
    """
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(num, generator=generator, dtype=torch.float64) + 0.1
    steps = torch.diag(size)[:, None]  # item i adds size[i] to dimension i
    return [lambda x, step=step: x + torch.nn.functional.pad(step, (0, 1)) for step in steps], size


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("costs", [[1] * 8, [2, 3, 2, 3, 1, 3, 2, 4]], ids=["CLaSp", "knapsack"])
def test_where_layers_do_not_interact_it_is_the_optimum_over_all_sets(costs, seed):
    layers, size = additive_layers(8, seed)
    start = torch.zeros(1, 9, dtype=torch.float64)
    start[0, -1] = 1.0
    truth, budget = states_of(layers, start), 10
    found = best_skips(layers, truth, costs, min(budget, sum(costs)))
    for total, one in enumerate(found):
        sets = [
            subset
            for count in range(9)
            for subset in itertools.combinations(range(8), count)
            if sum(costs[i] for i in subset) == total
        ]
        if not sets:
            assert one is None, total
            continue
        least_lost = min(float((size[list(subset)] ** 2).sum()) for subset in sets)
        assert float((size[list(one.items)] ** 2).sum()) == pytest.approx(least_lost), (total, one)


def test_states_that_turned_away_are_given_up():
    layers, generator = random_layers(6, 6, 0, strength=3.0)
    truth = states_of(layers, torch.randn(2, 6, generator=generator, dtype=torch.float64))
    found = best_skips(layers, truth, [1] * 6, 6, least=0.9)
    assert found[0] is not None and any(one is None for one in found)
    assert all(one is None or one.cosine >= 0.9 for one in found)
