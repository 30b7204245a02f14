"""The shapes of draft trees: numbering, what is refused, and that the greedy choice is the best one."""

from __future__ import annotations

import itertools

import pytest

from selfspec import UserError
from selfspec.lookahead import build_lookahead
from selfspec.lookahead.tree_shape import best_shape, shape_of_branches, shape_of_paths


def test_nodes_are_numbered_by_level_and_those_with_children_come_first():
    shape = shape_of_paths([[0], [1], [1, 0], [1, 1], [1, 1, 0]])
    assert shape.parents == (0, 0, 1, 1, 3)  # node 1 is the path [1], which has children; node 2 is [0]
    assert shape.depths == (0, 1, 1, 2, 2, 3)
    assert shape.levels == ((0, 1, 1), (1, 2, 3), (3, 4, 5), (5, 5, 6))


def test_siblings_keep_their_rank():
    shape = shape_of_paths([[0], [1], [2], [2, 0]])
    assert shape.children[0] == (2, 3, 1), "the likeliest first, whatever their numbers"
    assert shape.ancestors == ((0,), (0, 1), (0, 2), (0, 3), (0, 1, 4))


def test_branches():
    shape = shape_of_branches([2, 3])
    assert shape.num_nodes == 1 + 2 + 6 and shape.depth == 2
    assert all(len(children) == n for children, n in zip(shape.children, [2, 3, 3] + [0] * 6, strict=True))


def expected_length(paths, accuracies):
    total = 0.0
    for path in paths:
        probability = 1.0
        for depth, rank in enumerate(path):
            probability *= accuracies[depth][rank]
        total += probability
    return total


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 5, 6])
def test_the_greedy_tree_is_the_best_of_its_size(num_nodes):
    accuracies = [[0.45, 0.2, 0.1], [0.5, 0.15, 0.05], [0.6, 0.2, 0.1]]
    everything = [path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth)]
    best = 0.0
    for paths in itertools.combinations(everything, num_nodes - 1):
        try:
            shape_of_paths(paths)
        except UserError:
            continue
        best = max(best, expected_length(paths, accuracies))
    shape, expected = best_shape(accuracies, num_nodes)
    assert shape.num_nodes == num_nodes
    assert expected == pytest.approx(best)


def test_a_rank_that_is_never_right_is_no_end_of_the_search():
    shape, expected = best_shape([[0.5, 0.0, 0.0]], 9)
    assert expected == pytest.approx(0.5) and shape.num_nodes <= 9


@pytest.mark.parametrize(
    "given, message",
    [
        ({}, "given by one of branches, paths, or accuracies"),
        ({"branches": [2], "paths": [[0]]}, "given by one of"),
        ({"branches": []}, r"branches=\[\] is not possible"),
        ({"branches": [2, 0]}, r"branches=\[2, 0\] is not possible"),
        ({"paths": []}, "list of paths of ranks"),
        ({"paths": [[0], [1, 0]]}, r"holds the path \[1, 0\], but not \[1\]"),
        ({"paths": [[0], [2]]}, r"holds the path \[2\], but not \[1\]"),
        ({"paths": [[-1]]}, "negative rank"),
        ({"paths": [["a"]]}, "paths hold 'a'"),
        ({"paths": [[0.5]]}, r"paths hold 0\.5"),
        ({"accuracies": [[0.5], []], "num_nodes": 5}, r"accuracies\[1\] is empty"),
        ({"accuracies": [[0.5], [-0.1]], "num_nodes": 3}, r"a share in accuracies\[1\]=-0.1 is not possible"),
        ({"accuracies": [[float("nan")]], "num_nodes": 2}, "=nan is not possible"),
        ({"accuracies": [[0.5, 0.2]], "num_nodes": 2.5}, "num_nodes=2.5 is not possible"),
        ({"accuracies": [[0.5]]}, "accuracies with num_nodes"),
        ({"accuracies": [[0.5]], "num_nodes": 1}, "num_nodes=1"),
        ({"accuracies": [], "num_nodes": 4}, "num_nodes=4"),
        ({"accuracies": [[0.5] * 9] * 9, "num_nodes": 10**9}, "num_nodes=1000000000 .* allowed are 65536"),
        ({"branches": [10] * 20}, "the first 5 levels alone have 111111 nodes, .* allowed are 65536"),
    ],
)
def test_impossible_trees_are_refused(given, message):
    with pytest.raises(UserError, match=message):
        build_lookahead({"kind": "tree", **given})
