"""Which nodes a dynamic tree has: the likeliest of all candidates, with all their parents, on ties too."""

from __future__ import annotations

import pytest
import torch
from tree_drafters import TARGET

from selfspec import Decoder, UserError, build_drafter, decode
from selfspec.decoding.dynamic_drafting import DynamicTreeDrafting
from selfspec.decoding.rows import Rows
from selfspec.decoding.sampler import Sampler
from selfspec.lookahead import build_lookahead
from selfspec.sampling import Sampling, build_rule, build_transforms
from selfspec.sampling.acceptance.tree_rules import build_tree_rule
from tiny_models import prompt_ids

V = 6
GREEDY = Sampling()
SAMPLER = Sampler(
    build_transforms(GREEDY, None, V), build_rule("auto", GREEDY), tree_rule=build_tree_rule("auto", GREEDY)
)


def logits_below(kind, path, seed):
    """Of the children of a path of tokens."""
    generator = torch.Generator().manual_seed(hash((seed, *path)) % 2**31)
    logits_V = torch.randn(V, generator=generator)
    if kind == "equal":  # all paths of a length are ties
        return torch.zeros(V)
    if kind == "saturated":  # log q is 0, exactly: a child is as likely as its parent
        return torch.where(torch.arange(V) == path[-1] % V, 0.0, -1e9)
    if kind == "few":  # most candidates do not exist
        return torch.where(torch.arange(V) < 2, logits_V, -torch.inf)
    if kind == "none":
        return torch.where(torch.arange(V) < (len(path) == 1), logits_V, -torch.inf)
    return 3 * logits_V


def grown(kind, growth, lengths=(3, 9, 5)):
    """One draft phase over rows of unequal length; returns the draft, the rows, and every candidate path's score."""
    rows = Rows(TARGET, len(lengths), 100)
    for row, length in enumerate(lengths):
        rows.place(row, prompt_ids(length, seed=length), 40, row)
    drafting = DynamicTreeDrafting(rows, build_lookahead({"kind": "dynamic_tree", **growth}).choose(), SAMPLER)
    candidates = [{} for _ in lengths]
    for _ in drafting:
        slots, (_, block) = drafting.nodes, drafting.block(drafting.nodes)
        logits_BnV = torch.zeros(len(lengths), slots.stop - slots.start, V)
        for row in range(len(lengths)):
            tokens = rows.tokens_BS[row, lengths[row] - 1 :].tolist()
            for place in range(slots.stop - slots.start):
                path = tuple(tokens[slot] for slot in block.seen_BTN[row, place].nonzero()[:, 0].tolist())
                logits_BnV[row, place] = logits_V = logits_below(kind, path, row)
                score = candidates[row].get(path[1:], -torch.inf) if len(path) > 1 else 0.0
                log_q_V = logits_V.log_softmax(-1) if logits_V.amax() > -torch.inf else logits_V
                best = log_q_V.topk(growth["top_k"])
                for token, log_q in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                    if log_q > -torch.inf and score > -torch.inf:
                        candidates[row][(*path[1:], token)] = score + log_q
        drafting.grow(logits_BnV)
    return drafting.draft(), rows, candidates


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["random", "equal", "saturated", "few", "none"])
@pytest.mark.parametrize(
    "growth",
    [
        dict(depth=3, top_k=3, num_nodes=9),
        dict(depth=4, top_k=2, num_nodes=15),
        dict(depth=1, top_k=4, num_nodes=5),
        dict(depth=4, top_k=1, num_nodes=5),
    ],
    ids=["usual", "all of them", "flat", "chain"],
)
def test_the_likeliest_paths_are_verified_and_their_parents_with_them(kind, growth):
    draft, rows, candidates = grown(kind, growth)
    tree, layout = draft.tree, draft.layout
    assert tree.tokens_BN.shape[1] == growth["num_nodes"]
    for row, scores in enumerate(candidates):
        paths = {0: ()}
        for node in range(growth["num_nodes"]):  # parents come before their children
            for child in tree.children_BNC[row, node].tolist():
                if child > 0:
                    assert child > node and child not in paths, "one parent each"
                    paths[child] = (*paths[node], int(tree.tokens_BN[row, child]))
        found = sorted((scores[path] for path in paths.values() if path), reverse=True)
        most = min(growth["num_nodes"] - 1, len(scores))
        assert len(found) == most and len(set(paths.values())) == most + 1
        assert found == pytest.approx(sorted(scores.values(), reverse=True)[:most], abs=1e-5)
        slots = [int(layout.slots_RN[row, node]) for node in range(growth["num_nodes"])]
        assert len(set(slots)) == len(slots)
        pending = int(rows.lengths_B[row])
        for node, path in paths.items():  # where it stands and what it sees is its path
            seen = layout.seen_RNP[row, node].nonzero()[:, 0].tolist()
            assert rows.tokens_BS[row, [pending + slot for slot in seen[1:]]].tolist() == list(path)
            assert seen[-1] == slots[node] and len(seen) == len(path) + 1
            assert int(layout.depths_RN[row, node]) == len(path) == int(layout.slot_depths_RP[row, slots[node]])


@torch.inference_mode()
def test_of_a_level_the_likeliest_paths_are_expanded():
    growth = dict(depth=3, top_k=2, num_nodes=8)
    _, _, candidates = grown("random", growth)
    for scores in candidates:
        second = sorted((path for path in scores if len(path) == 2), key=scores.get, reverse=True)
        assert {path[:2] for path in scores if len(path) == 3} == set(second[:2])


def test_a_surer_draft_gets_a_deeper_tree():
    """The same policy walks deeper where the draft is right: what it is for."""
    options = dict(max_new_tokens=30, ignore_eos=True)
    lookahead = {"kind": "dynamic_tree", "depth": 6, "top_k": 2, "num_nodes": 8}
    sure = decode(
        TARGET, build_drafter("independent", TARGET, model=TARGET), [prompt_ids(9)], lookahead=lookahead, **options
    )
    depths = [record.num_drafted for record in sure[0].rounds]
    assert min(depths) >= 2 and len(set(depths)) > 1, "the tree's depth follows the text"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(depth=0), "depth=0 is not possible"),
        (dict(top_k=True), "top_k=True is not possible"),
        (dict(num_nodes=1), "num_nodes=1 is not possible: allowed is a whole number, 2 or more"),
        (dict(depth=2, top_k=2, num_nodes=8), "a tree of at most 7 nodes"),
        (dict(depth=10**12), "depth=1000000000000 is not possible: num_nodes=12 .* beyond depth=11 ever would be"),
        (dict(top_k=10**12), "top_k=1000000000000 is not possible: .* beyond top_k=11 ever would be"),
        (dict(breadth=2), "Bad options for lookahead 'dynamic_tree'"),
    ],
)
def test_impossible_dynamic_trees_are_refused(given, message):
    with pytest.raises(UserError, match=message):
        build_lookahead({"kind": "dynamic_tree", **given})


@pytest.mark.parametrize(
    ("lookahead", "width"),
    [
        ({"kind": "dynamic_tree", "depth": 100, "top_k": 100, "num_nodes": 200}, 1 + 99 * 100 + 199),
        ({"kind": "dynamic_tree", "depth": 10**12, "top_k": 10**12, "num_nodes": 10**12 + 1}, 10**24 + 1),
        ({"kind": "tree", "branches": [2] * 8}, 511),
        (10**12, 10**12 + 1),
    ],
    ids=["dynamic", "enormous", "static", "chain"],
)
def test_no_round_is_wider_than_the_target_has_positions(lookahead, width):
    """Whatever memory there is: before anything is allocated or run, and before anything as large is made."""
    drafter = build_drafter("early_exit", TARGET, exit_layer=2)
    message = f"makes a round of up to {width} tokens, drafted and pending; wrapped has 256 positions"
    decoder = Decoder(TARGET, drafter, memory_limit_bytes=1 << 60)
    for ask in (decoder.decode, decoder.estimate):
        with pytest.raises(UserError, match=message):
            ask([prompt_ids(9)], lookahead=lookahead, max_new_tokens=2)
    assert decoder.rows is None


def test_copies_have_no_dynamic_tree():
    with pytest.raises(UserError, match="'ngram' drafts one continuation, not a tree"):
        decode(TARGET, build_drafter("ngram", TARGET), [prompt_ids(9)], lookahead="dynamic_tree")


@pytest.mark.parametrize(
    "lookahead",
    [
        {"kind": "dynamic_tree", "depth": 2, "top_k": TARGET.vocab_size + 3, "num_nodes": TARGET.vocab_size + 9},
        {"kind": "tree", "branches": [TARGET.vocab_size + 3]},
    ],
    ids=["dynamic", "static"],
)
def test_more_children_than_there_are_tokens(lookahead):
    options = dict(max_new_tokens=4, ignore_eos=True)
    expected = decode(TARGET, None, [prompt_ids(9)], **options)[0].token_ids
    drafter = build_drafter("early_exit", TARGET, exit_layer=2)
    assert decode(TARGET, drafter, [prompt_ids(9)], lookahead=lookahead, **options)[0].token_ids == expected
