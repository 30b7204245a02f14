"""Draft trees in the real loop: the output is the target's own, and the branches not taken leave nothing behind."""

from __future__ import annotations

import pytest
import torch
from tree_drafters import COUPLED, DRAFTERS, PENALISED, PROMPTS, TARGET, drafter_of

from selfspec import Decoder, Sampling, UserError, build_drafter, decode, wrap_target
from selfspec.decoding.round import begin_draft, decode_round, prefill
from selfspec.decoding.rows import Rows
from selfspec.decoding.sampler import Sampler
from selfspec.decoding.stopwatch import Stopwatch
from selfspec.lookahead import build_lookahead
from selfspec.sampling import build_rule, build_transforms
from selfspec.sampling.acceptance import tree_rules
from selfspec.sampling.acceptance.tree_rules import build_tree_rule
from selfspec.sampling.noise import STREAM_TREE
from tiny_models import TINY, prompt_ids, tiny_model

TREE = {"kind": "tree", "branches": [3, 2, 1]}
DYNAMIC = {"kind": "dynamic_tree", "depth": 3, "top_k": 4, "num_nodes": 14}
LARGE = {"kind": "dynamic_tree", "depth": 2, "top_k": 16, "num_nodes": 65}  # for random drafts, which are seldom right
WIDE = {"kind": "tree", "branches": [16, 4]}  # for random drafts, which are seldom right
SKEW = {"kind": "tree", "paths": [[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 1, 0], [0, 1, 0, 0]]}


@pytest.mark.parametrize("cache, max_batch_rows", [("contiguous", 3), ("paged", 1)])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_are_the_targets_own(drafter, cache, max_batch_rows):
    trees = [(WIDE, {}), (SKEW, COUPLED), (LARGE, {}), (DYNAMIC, PENALISED)]
    for tree, options in trees if cache == "contiguous" else [(TREE, PENALISED), (DYNAMIC, COUPLED)]:
        options = dict(max_new_tokens=24, ignore_eos=True, **options)
        expected = [output.token_ids for output in decode(TARGET, None, PROMPTS, **options)]
        outputs = decode(
            TARGET, drafter_of(drafter), PROMPTS, lookahead=tree, max_batch_rows=max_batch_rows, cache=cache, **options
        )
        assert [output.token_ids for output in outputs] == expected
        if tree in (WIDE, LARGE):
            assert any(r.num_accepted for output in outputs for r in output.rounds), "no path was ever walked"


@pytest.mark.parametrize("tree", [TREE, DYNAMIC], ids=["static", "dynamic"])
@pytest.mark.parametrize("family", sorted(TINY))
def test_every_family_sees_only_the_path(family, tree):
    target = wrap_target(tiny_model(family))
    drafter = build_drafter("early_exit", target, exit_layer=target.num_layers - 1)
    options = dict(max_new_tokens=20, ignore_eos=True)
    expected = decode(target, None, PROMPTS[1:3], **options)
    outputs = decode(target, drafter, PROMPTS[1:3], lookahead=tree, max_batch_rows=2, **options)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]


@pytest.mark.parametrize(
    "drafter", ["early_exit", "layer_skip", "exit_adapter", "independent", "eagle3", "mtp", "medusa", "hydra"]
)
def test_a_tree_without_branches_is_a_chain(drafter):
    options = dict(max_new_tokens=30, ignore_eos=True, max_batch_rows=2)
    chain = decode(TARGET, drafter_of(drafter), PROMPTS, lookahead=3, **options)
    static = decode(TARGET, drafter_of(drafter), PROMPTS, lookahead={"kind": "tree", "branches": [1, 1, 1]}, **options)
    grown = {"kind": "dynamic_tree", "depth": 3, "top_k": 1, "num_nodes": 4}
    dynamic = decode(TARGET, drafter_of(drafter), PROMPTS, lookahead=grown, **options)
    told = [[[(r.num_drafted, r.num_accepted) for r in o.rounds] for o in outs] for outs in (chain, static, dynamic)]
    assert told[0] == told[1] == told[2]


@pytest.mark.parametrize("sampled", [{}, COUPLED, dict(sampling=Sampling(temperature=1.0), seed=1)])
def test_a_drafter_equal_to_the_target_walks_to_the_bottom(sampled):
    """Its first candidate is right at every level, if its cache holds the accepted path and nothing else."""
    options = dict(max_new_tokens=40, ignore_eos=True, max_batch_rows=3, **sampled)
    outputs = decode(TARGET, drafter_of("independent_equal"), PROMPTS, lookahead=TREE, **options)
    for output in outputs:
        assert all(record.num_accepted == record.num_drafted == 3 for record in output.rounds[:-1])


@pytest.mark.parametrize("sampled", [{}, COUPLED])
def test_a_dynamic_tree_of_a_drafter_equal_to_the_target_never_rejects(sampled):
    """It may end at a leaf before its depth, where others were likelier; never at a node that has children."""
    options = dict(max_new_tokens=40, ignore_eos=True, max_batch_rows=3, **sampled)
    outputs = decode(TARGET, drafter_of("independent_equal"), PROMPTS, lookahead=DYNAMIC, **options)
    records = [record for output in outputs for record in output.rounds[:-1]]
    assert all(record.num_accepted == record.num_drafted for record in records)
    assert max(record.num_accepted for record in records) == 3


@torch.inference_mode()
@pytest.mark.parametrize("tree", [WIDE, SKEW, DYNAMIC], ids=["wide", "skew", "dynamic"])
@pytest.mark.parametrize("drafter", ["early_exit", "layer_skip", "eagle3", "independent_equal", "exit_adapter"])
def test_a_rejected_branch_leaves_no_trace_in_the_cache(drafter, tree):
    """After rounds with trees the keys and values of the committed text are those of a prefill."""
    drafter, sampling = drafter_of(drafter), Sampling()
    sampler = Sampler(
        build_transforms(sampling, None, TARGET.vocab_size),
        build_rule("auto", sampling),
        tree_rule=build_tree_rule("auto", sampling),
    )
    plan = build_lookahead(tree).choose()

    def placed(token_ids):
        rows = Rows(TARGET, 1, 220)
        drafter.start(rows)
        rows.place(0, token_ids, 100, 0)
        prefill(TARGET, drafter, rows, 0, 0, len(token_ids) - 1)
        return rows

    rows = placed(prompt_ids(9))
    for _ in range(20):
        report = decode_round(TARGET, drafter, rows, begin_draft(rows, plan, sampler), sampler, Stopwatch(rows.device))
        rows.advance(0, [int(x) for x in report[0, -(plan.num_drafted + 1) :][: int(report[0, 2])]])
    length = int(rows.lengths_B[0])
    if drafter.name in ("early_exit", "independent") or tree is WIDE:
        assert length > 8 + 20, "some paths were accepted"
    fresh = placed(rows.tokens_BS[0, : length + 1].tolist())
    for layer, expected in zip(rows.cache.layers, fresh.cache.layers, strict=True):
        torch.testing.assert_close(layer[:length], expected[:length], rtol=1e-4, atol=1e-4)
    if (output := getattr(rows.draft_state, "output_BM", None)) is not None:
        torch.testing.assert_close(output, fresh.draft_state.output_BM, rtol=1e-3, atol=1e-3)


def test_more_branches_accept_more():
    decoder, accepted = Decoder(TARGET, drafter_of("eagle3"), capacity=200), []
    for branches in ([1], [4], [16]):
        outputs = decoder.decode(
            PROMPTS, lookahead={"kind": "tree", "branches": branches}, max_new_tokens=40, ignore_eos=True
        )
        accepted.append(sum(r.num_accepted for o in outputs for r in o.rounds))
    assert accepted[0] < accepted[1] < accepted[2]


def test_no_two_nodes_of_a_static_tree_draw_with_the_same_noise(monkeypatch):
    """Children drawn with what drew their parent would not follow q, nor the output p."""
    used = []
    original = tree_rules.uniforms

    def noted(seed, request_B, position_B, stream, n, first_index=0):
        if stream == STREAM_TREE:
            used.append([*range(first_index, first_index + n)])
        return original(seed, request_B, position_B, stream, n, first_index)

    monkeypatch.setattr(tree_rules, "uniforms", noted)
    late = {"kind": "tree", "paths": [[0], [1], [1, 0], [1, 0, 0]]}  # node 1 is the path [1], with one child
    options = dict(max_new_tokens=1, sampling=Sampling(temperature=1.0))
    decode(TARGET, drafter_of("early_exit"), [prompt_ids(5)], lookahead=late, **options)
    assert len(used) == 3 and len({index for one in used for index in one}) == sum(map(len, used))


def test_what_has_no_tree_is_refused():
    with pytest.raises(UserError, match="'ngram' drafts one continuation, not a tree"):
        decode(TARGET, build_drafter("ngram", TARGET), PROMPTS, lookahead=TREE)
    sampled = dict(sampling=Sampling(temperature=1.0), acceptance="block")
    with pytest.raises(UserError, match="acceptance='block' has no tree form"):
        decode(TARGET, drafter_of("early_exit"), PROMPTS, lookahead=TREE, **sampled)
    with pytest.raises(UserError, match="drafts at most 4 tokens"):
        decode(TARGET, drafter_of("medusa"), PROMPTS, lookahead={"kind": "tree", "branches": [1] * 5})
