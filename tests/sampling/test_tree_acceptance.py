"""Trees: certain children by following the own draw, drawn children by recursive rejection; both keep the target."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy import stats
from torch import Tensor

from selfspec.sampling import NoiseKey, Sampling, faults
from selfspec.sampling.acceptance import tree as tree_module
from selfspec.sampling.acceptance.tree import Tree, accept_certain, accept_without_replacement, take_out
from selfspec.sampling.acceptance.tree_rules import CoupledTree, GreedyTree, RejectionTree, build_tree_rule
from selfspec.sampling.exact_device import distinct, replay_tree
from selfspec.sampling.exact_rules import play_tree_follow, play_tree_without_replacement
from selfspec.sampling.games import GAMES
from selfspec.sampling.noise import STREAM_VERIFY, gumbel, uniforms

ALPHA = 1e-6  # false-alarm rate of each statistical test
V, C, DEPTH = 6, 2, 2
# node 0 -> 1, 2; node 1 -> 3, 4; node 2 -> 5
CHILDREN = torch.tensor([[1, 2], [3, 4], [5, 0], [0, 0], [0, 0], [0, 0]])


def full_tree(n: int, seed: int, drawn: bool) -> tuple[Tree, Tensor]:
    """n trees of the same shape over models that depend on the path; children drawn or the likeliest."""
    generator = torch.Generator().manual_seed(seed)
    p_model, q_model = (torch.randn(2, V + 1, V, generator=generator) * 1.5 for _ in range(2))

    def at_path(model: Tensor, path: list[Tensor]) -> Tensor:
        logits = model[0, path[-1]] if path else model[0, V].expand(n, V)
        return logits + (model[1, path[-2]] if len(path) > 1 else model[1, V])

    tokens = torch.zeros(n, 6, dtype=torch.int64)
    q_BNV, logits_BNV = torch.full((n, 6, V), 1 / V), torch.zeros(n, 6, V)
    paths: dict[int, list[Tensor]] = {0: []}
    for node in range(6):
        logits_BNV[:, node] = at_path(p_model, paths[node])
        q_BNV[:, node] = at_path(q_model, paths[node]).softmax(-1)
        children = [c for c in CHILDREN[node].tolist() if c > 0]
        rest = q_BNV[:, node]
        for child in children:
            token = torch.multinomial(rest, 1, generator=generator) if drawn else rest.argmax(-1, keepdim=True)
            tokens[:, child] = token[:, 0]
            paths[child] = [*paths[node], token[:, 0]]
            rest = rest.scatter(1, token, 0.0)
    return Tree(tokens, CHILDREN.expand(n, 6, C), DEPTH, q_BNV if drawn else None), logits_BNV


@pytest.mark.parametrize(
    ("play", "drawn"), [(play_tree_without_replacement, True), (play_tree_follow, False)], ids=["drawn", "certain"]
)
def test_device_code_replays_every_branch_of_the_exact_rule(play, drawn: bool) -> None:
    for game in distinct(GAMES):
        if game.num_drafts < 3:
            assert replay_tree("tree", game, play, drawn).mismatches == []


def test_replay_notices_a_q_that_is_not_renormalised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the usual mistake of drawing without replacement."""
    monkeypatch.setattr(tree_module, "take_out", lambda q_BV, x_B1: take_out(q_BV, x_B1) * 0 + 1)
    assert replay_tree("control", GAMES[0], play_tree_without_replacement, True).mismatches


def first_token_pvalue(tree: Tree, logits_BNV: Tensor, path_BD: Tensor, next_token_B: Tensor) -> float:
    """chi2 of the first emitted token against p at the root."""
    first = torch.where(path_BD[:, 0] > 0, tree.tokens_BN.gather(1, path_BD[:, :1])[:, 0], next_token_B)
    expected = logits_BNV[0, 0].double().softmax(-1) * len(first)
    return float(stats.chisquare(torch.bincount(first, minlength=V).numpy(), expected.numpy()).pvalue)


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "certain"])
def test_first_token_follows_the_target_in_float32(drawn: bool) -> None:
    n = 40_000
    tree, logits_BNV = full_tree(n, seed=1, drawn=drawn)
    verdict = RejectionTree().accept(tree, logits_BNV, NoiseKey(0, torch.arange(n), torch.arange(n)))
    assert verdict.error_B.eq(0).all()
    assert verdict.num_accepted_B.unique().tolist() == [0, 1, 2]
    assert first_token_pvalue(tree, logits_BNV, verdict.path_BD, verdict.next_token_B) > ALPHA


def test_chi2_notices_likeliest_children_tested_by_q() -> None:
    """Negative control: certain children handed over as if they had been drawn (EAGLE 183)."""
    n = 40_000
    tree, logits_BNV = full_tree(n, seed=1, drawn=False)
    q_BNV = full_tree(n, seed=1, drawn=True)[0].q_BNV
    wrong = Tree(tree.tokens_BN, tree.children_BNC, DEPTH, q_BNV)
    verdict = RejectionTree().accept(wrong, logits_BNV, NoiseKey(0, torch.arange(n), torch.arange(n)))
    assert first_token_pvalue(tree, logits_BNV, verdict.path_BD, verdict.next_token_B) < ALPHA


def test_path_runs_through_parents_and_stops_where_it_says() -> None:
    n = 2_000
    for drawn in (True, False):
        tree, logits_BNV = full_tree(n, seed=2, drawn=drawn)
        verdict = RejectionTree().accept(tree, logits_BNV, NoiseKey(3, torch.arange(n), torch.arange(n)))
        for path, count in zip(verdict.path_BD.tolist(), verdict.num_accepted_B.tolist(), strict=True):
            nodes = [0, *path[:count]]
            assert all(child in CHILDREN[node].tolist() for node, child in itertools.pairwise(nodes))
            assert path[count:] == [0] * (DEPTH - count)


def test_greedy_tree_follows_the_argmax_and_takes_the_first_of_equal_children() -> None:
    logits = torch.full((1, 6, V), 0.0)
    logits[0, 0, 4] = logits[0, 1, 2] = logits[0, 4, 5] = logits[0, 2, 1] = 9.0
    tree = Tree(torch.tensor([[0, 4, 4, 1, 2, 3]]), CHILDREN[None], DEPTH)
    verdict = GreedyTree().accept(tree, logits, NoiseKey(0, torch.tensor([0]), torch.tensor([0])))
    assert verdict.path_BD.tolist() == [[1, 4]]
    assert verdict.next_token_B.tolist() == [5]


def test_missing_children_are_never_accepted() -> None:
    """Child number 0 means none, also when the token stored at node 0 is what the target wants."""
    logits = torch.nn.functional.one_hot(torch.tensor([[4] * 6]), V).float() * 1e4
    tree = Tree(torch.tensor([[4, 4, 4, 4, 4, 4]]), torch.zeros(1, 6, C, dtype=torch.int64), DEPTH)
    key = NoiseKey(0, torch.tensor([0]), torch.tensor([0]))
    for rule in (GreedyTree(), RejectionTree(), CoupledTree()):
        verdict = rule.accept(tree, logits, key)
        assert (verdict.num_accepted_B.tolist(), verdict.next_token_B.tolist()) == ([0], [4])
    drawn = Tree(tree.tokens_BN, tree.children_BNC, DEPTH, torch.full((1, 6, V), 1 / V))
    verdict = RejectionTree().accept(drawn, logits, key)
    assert (verdict.num_accepted_B.tolist(), verdict.next_token_B.tolist()) == ([0], [4])


def test_tree_of_depth_0_is_a_plain_draw() -> None:
    n = 30
    logits = torch.randn(n, 1, V)
    tree = Tree(torch.zeros(n, 1, dtype=torch.int64), torch.zeros(n, 1, 1, dtype=torch.int64), 0)
    key = NoiseKey(0, torch.arange(n), torch.arange(n))
    assert torch.equal(GreedyTree().accept(tree, logits, key).next_token_B, logits[:, 0].argmax(-1))
    own = logits[:, 0] + gumbel(0, key.request_B, key.position_B[:, None], V)[:, 0]
    assert torch.equal(CoupledTree().accept(tree, logits, key).next_token_B, own.argmax(-1))


def test_coupled_tree_emits_the_targets_own_draws() -> None:
    n = 2_000
    tree, logits_BNV = full_tree(n, seed=4, drawn=False)
    key = NoiseKey(5, torch.arange(n), torch.arange(n) + 3)
    verdict = CoupledTree().accept(tree, logits_BNV, key)
    noise_BDV = gumbel(5, key.request_B, key.position_B[:, None] + torch.arange(DEPTH + 1), V)
    node_B = torch.zeros(n, dtype=torch.int64)
    for level in range(DEPTH + 1):
        own_B = (logits_BNV[torch.arange(n), node_B] + noise_BDV[:, level]).argmax(-1)
        going = verdict.num_accepted_B > level
        ends = verdict.num_accepted_B == level
        assert torch.equal(verdict.next_token_B[ends], own_B[ends])
        if level < DEPTH:
            node_B = torch.where(going, verdict.path_BD[:, level], node_B)
            assert torch.equal(tree.tokens_BN.gather(1, node_B[:, None])[going, 0], own_B[going])


def test_coupled_children_hold_the_own_draw_when_drafter_and_target_agree() -> None:
    logits = torch.randn(200, V)
    key = NoiseKey(0, torch.arange(200), torch.arange(200))
    children = CoupledTree().draw_children(logits[:, None], 3, key, num_nodes=1, level=1, most_children=3)
    own = (logits + gumbel(0, key.request_B, key.position_B[:, None] + 1, V)[:, 0]).argmax(-1)
    assert torch.equal(children.tokens_BnC[:, 0, 0], own)
    assert children.exist_BnC.all()
    assert children.q_BnV is None


def test_children_are_drawn_without_replacement_with_the_right_odds() -> None:
    """chi2 of the 12 ordered pairs over 60,000 draws: P(a, b) = q(a) q(b) / (1 - q(a))."""
    n = 60_000
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5])
    rule = RejectionTree()
    key = NoiseKey(0, torch.arange(n), torch.zeros(n, dtype=torch.int64))
    children = rule.draw_children(logits.expand(n, 1, 4), 2, key, num_nodes=1, level=0, most_children=2)
    tokens = children.tokens_BnC[:, 0]
    assert children.exist_BnC.all()
    assert children.q_BnV is not None
    assert (tokens[:, 0] != tokens[:, 1]).all()
    probability = logits.double().softmax(-1)
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    expected = [n * float(probability[a] * probability[b] / (1 - probability[a])) for a, b in pairs]
    counts = torch.bincount(tokens[:, 0] * 4 + tokens[:, 1], minlength=16)
    observed = [int(counts[a * 4 + b]) for a, b in pairs]
    assert stats.chisquare(observed, expected).pvalue > ALPHA
    with_replacement = torch.tensor([float(probability[a] * probability[b]) for a, b in pairs]).double()
    control = (with_replacement / with_replacement.sum() * n).tolist()
    assert stats.chisquare(observed, control).pvalue < ALPHA, "negative control"


def test_children_that_do_not_exist_are_marked() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0, -torch.inf]])
    key = NoiseKey(0, torch.tensor([0]), torch.tensor([0]))
    for rule in (RejectionTree(), GreedyTree(), CoupledTree()):
        children = rule.draw_children(logits[None], 3, key, num_nodes=1, level=0, most_children=3)
        assert children.exist_BnC.tolist() == [[[True, True, False]]]
        assert sorted(children.tokens_BnC[0, 0, :2].tolist()) == [0, 2]
        ranked, log_BnC = rule.rank_children(logits[None], 3, key, level=0)
        assert sorted(ranked.tokens_BnC[0, 0, :2].tolist()) == [0, 2] and log_BnC[0, 0, 2] == -torch.inf


def test_likely_children_come_with_their_probabilities() -> None:
    logits, key = torch.tensor([[[0.0, 2.0, 1.0]]]), NoiseKey(0, torch.tensor([0]), torch.tensor([0]))
    for rule in (GreedyTree(), RejectionTree()):
        ranked, log_BnC = rule.rank_children(logits, 2, key, level=0)
        assert ranked.tokens_BnC.tolist() == [[[1, 2]]]
        assert torch.allclose(log_BnC.exp(), logits.softmax(-1)[..., [1, 2]])
    certain = torch.tensor([[[-1e9, 0.0, -1e9]]])
    assert RejectionTree().rank_children(certain, 1, key, level=0)[1].item() == 0.0, "never above 0"


def test_neighbouring_nodes_draw_their_children_independently() -> None:
    """Each node's numbers are its own, however many children it has: else a child would foretell its own children."""
    n = 4000
    key = NoiseKey(0, torch.arange(n), torch.zeros(n, dtype=torch.int64))
    rule, logits = RejectionTree(), torch.zeros(n, 1, 4)
    root = rule.draw_children(logits, 2, key, num_nodes=1, level=0, most_children=2).tokens_BnC[:, 0, 1]
    below = NoiseKey(0, key.request_B, key.position_B, step=1)
    child = rule.draw_children(logits, 1, below, num_nodes=2, level=1, most_children=2).tokens_BnC[:, :, 0]
    for other in (child[:, 0], child[:, 1]):
        table = torch.bincount(4 * root + other, minlength=16).reshape(4, 4).numpy()
        assert stats.chi2_contingency(table).pvalue > ALPHA
    narrow = rule.draw_children(logits, 1, below, num_nodes=1, level=1, most_children=1).tokens_BnC[:, 0, 0]
    table = torch.bincount(4 * root + narrow, minlength=16).reshape(4, 4).numpy()
    assert stats.chi2_contingency(table).pvalue < ALPHA, "negative control: as many numbers as the node has children"


def test_where_nothing_of_p_is_left_the_token_is_drawn_from_p() -> None:
    """p = q, and a number that rounding may give: u q(x) = p(x), which does not stand."""
    logits, q = torch.zeros(1, 3, 4), torch.full((1, 3, 4), 0.25)
    logits[0, 0, 3], q[0, 0, 3] = -torch.inf, 0.0
    logits[0, 0, 2], q[0, 0, 2] = -torch.inf, 0.0
    q[0, 0, :2] = 0.5
    tree = Tree(torch.tensor([[0, 1, 0]]), torch.tensor([[[1, 2], [0, 0], [0, 0]]]), 1, q)
    for u, token in [(0.3, 0), (0.7, 1)]:
        one = torch.ones(1, 1, 2, dtype=torch.float64)
        verdict = accept_without_replacement(tree, logits, one, torch.tensor([u], dtype=torch.float64))
        assert (verdict.num_accepted_B.item(), verdict.next_token_B.item(), verdict.error_B.item()) == (0, token, 0)


def test_faults_are_reported_at_the_level_where_the_walk_meets_them() -> None:
    n = 400
    for drawn in (True, False):
        tree, logits_BNV = full_tree(n, seed=6, drawn=drawn)
        logits_BNV[:, 1:3] = torch.nan
        verdict = RejectionTree().accept(tree, logits_BNV, NoiseKey(0, torch.arange(n), torch.arange(n)))
        met = verdict.num_accepted_B == 1
        assert 0 < int(met.sum()) < n
        assert verdict.error_B[met].eq(faults.NAN_LOGITS + 8).all()
        assert verdict.error_B[~met].eq(0).all()


@pytest.mark.parametrize("rule", [GreedyTree(), CoupledTree()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_the_walk_ends_at_bad_logits_though_a_child_holds_what_they_choose(rule, bad: float) -> None:
    tree, logits_BNV = full_tree(1, 3, drawn=False)
    logits_BNV[0, 0, tree.tokens_BN[0, 1]] = bad
    zero_B = torch.zeros(1, dtype=torch.int64)
    verdict = rule.accept(tree, logits_BNV, NoiseKey(0, zero_B, zero_B))
    kind = faults.INFINITE_LOGITS if bad == float("inf") else faults.NAN_LOGITS
    assert (verdict.num_accepted_B.item(), verdict.error_B.item()) == (0, kind)


def test_impossible_children_and_bad_q_are_reported() -> None:
    tree, logits_BNV = full_tree(4, seed=7, drawn=True)
    assert tree.q_BNV is not None
    u = uniforms(0, torch.arange(4), torch.arange(4), STREAM_VERIFY, 1 + DEPTH * C)
    q_BNV = tree.q_BNV.clone()
    q_BNV[0, 0] *= 0.5
    q_BNV[1, 0] = torch.nan
    q_BNV[2, 0].scatter_(0, tree.tokens_BN[2, 1:2], 0.0)
    q_BNV[2, 0] /= q_BNV[2, 0].sum()
    bad = Tree(tree.tokens_BN, tree.children_BNC, DEPTH, q_BNV)
    verdict = accept_without_replacement(bad, logits_BNV, u[:, 1:].reshape(4, DEPTH, C), u[:, 0])
    bad_q, impossible = faults.BAD_DRAFT_DISTRIBUTION, faults.IMPOSSIBLE_DRAFT
    assert verdict.error_B.tolist() == [bad_q, bad_q, impossible, 0]


def test_rules_by_name_judge_the_same_tree() -> None:
    tree, logits_BNV = full_tree(3, seed=8, drawn=False)
    key = NoiseKey(0, torch.arange(3), torch.arange(3))
    assert build_tree_rule("auto", Sampling()).accept(tree, logits_BNV, key).error_B.eq(0).all()
    u = uniforms(0, key.request_B, key.position_B, STREAM_VERIFY, DEPTH + 1)
    by_name = build_tree_rule("rejection", Sampling(temperature=1.0)).accept(tree, logits_BNV, key)
    assert torch.equal(by_name.next_token_B, accept_certain(tree, logits_BNV, u).next_token_B)
