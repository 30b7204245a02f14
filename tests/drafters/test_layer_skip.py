"""Drafting without some sublayers: the target is untouched, the shared cache stays the target's, and the two ends of
the scale are what they must be, the target itself and an early exit.
"""

from __future__ import annotations

import json

import pytest
import torch

from selfspec import Sampling, UserError, build_drafter, decode, wrap_target
from selfspec.drafters.layer_skip import LayerSkip
from selfspec.drafters.skip_set import SkipSet, read_set, write_set
from selfspec.target.fused import fuse
from tiny_models import TINY, prompt_ids, tiny_llama, tiny_model

pytestmark = pytest.mark.usefixtures("small_chunks")

TARGET = wrap_target(tiny_llama(), name="tiny")
PROMPTS = [prompt_ids(length, seed=length) for length in (1, 9, 70)]
SAMPLED = dict(sampling=Sampling(temperature=1.0), seed=3)
TREE = {"kind": "tree", "branches": [3, 2, 1]}


def told(outputs):
    return [[(r.num_drafted, r.num_accepted, r.num_emitted) for r in output.rounds] for output in outputs]


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("lookahead", [4, TREE], ids=["chain", "tree"])
def test_skipping_nothing_accepts_everything(lookahead, options):
    drafter = LayerSkip(TARGET, SkipSet())
    outputs = decode(TARGET, drafter, PROMPTS, max_new_tokens=30, lookahead=lookahead, ignore_eos=True, **options)
    for record in (record for output in outputs for record in output.rounds):
        assert record.num_accepted == record.num_drafted > 0


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("lookahead", [3, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("exit_layer", [1, 2, 3])
def test_skipping_all_from_a_layer_on_is_an_early_exit(exit_layer, lookahead, options):
    above = list(range(exit_layer, TARGET.num_layers))
    skip = build_drafter("layer_skip", TARGET, skip_attention=above, skip_mlp=above)
    exit_ = build_drafter("early_exit", TARGET, exit_layer=exit_layer)
    options = dict(max_new_tokens=30, lookahead=lookahead, max_batch_rows=2, ignore_eos=True, **options)
    ours, theirs = decode(TARGET, skip, PROMPTS, **options), decode(TARGET, exit_, PROMPTS, **options)
    assert [output.token_ids for output in ours] == [output.token_ids for output in theirs]
    assert told(ours) == told(theirs)
    assert any(accepted for rounds in told(ours) for _, accepted, _ in rounds)


def reference_draft(target, skipped, context, num_drafted):
    """Greedy drafts from scratch: all committed keys by the whole target, those of drafts by the thinned one."""
    cache, drafted = target.make_cache(1, 128), []
    layers = target.thinned(skipped.attention, skipped.mlp)
    ids = torch.tensor([context[:-1]])
    pass_ = cache.open(torch.arange(len(context) - 1)[None], len(context) - 1)
    target.run_layers(target.embed(ids), 0, target.num_layers, pass_)
    for step in range(num_drafted):
        position = len(context) - 1 + step
        token = torch.tensor([[[*context, *drafted][position]]])
        pass_ = cache.open(torch.tensor([[position]]), position + 1)
        hidden = target.run_layers(target.embed(token), 0, target.num_layers, pass_, layers)
        drafted.append(int(target.head(hidden)[0, -1].argmax()))
    return drafted


@pytest.mark.parametrize("cache", ["contiguous", "paged"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_every_draft_is_the_one_computed_from_scratch(fused, cache):
    """Also after rejections, whose keys must not be seen: the draft reads the target's own keys of the text."""
    target, skipped = wrap_target(tiny_llama(seed=1)), SkipSet.of([1, 3], [2])
    if fused:
        assert fuse(target)
    found, context = [], [prompt_ids(9), prompt_ids(40)]
    outputs = decode(
        target, LayerSkip(target, skipped), context, max_new_tokens=24, lookahead=3, ignore_eos=True, cache=cache,
        max_batch_rows=2, on_round=lambda event: found.append((event.request.index, event.drafted_ids)),
    )  # fmt: skip
    lengths = [len(ids) for ids in context]
    texts = [ids + output.token_ids for ids, output in zip(context, outputs, strict=True)]
    rounds = [iter(output.rounds) for output in outputs]
    assert len({tuple(drafted) for _, drafted in found}) > 3
    with torch.inference_mode():
        for index, drafted in found:
            assert drafted == reference_draft(target, skipped, texts[index][: lengths[index]], 3)
            lengths[index] += next(rounds[index]).num_emitted


@pytest.mark.parametrize("name", sorted(TINY))
def test_every_family_drafts_and_keeps_its_tokens(name):
    target = wrap_target(tiny_model(name))
    drafter = build_drafter("layer_skip", target, skip_attention=[1], skip_mlp=[2])
    options = dict(max_new_tokens=20, ignore_eos=True)
    expected = [output.token_ids for output in decode(target, None, PROMPTS[1:], **options)]
    outputs = decode(target, drafter, PROMPTS[1:], lookahead=3, max_batch_rows=2, **options)
    assert [output.token_ids for output in outputs] == expected


def test_a_reduced_vocabulary_drafts_only_its_tokens():
    drafter, found = build_drafter("layer_skip", TARGET, skip_mlp=[3], d_vocab=20), []
    expected = decode(TARGET, None, PROMPTS, max_new_tokens=20)
    outputs = decode(
        TARGET, drafter, PROMPTS, max_new_tokens=20, lookahead=3, on_round=lambda e: found.extend(e.drafted_ids)
    )
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert found and max(found) < 20
    assert drafter.draft_bytes(1, 64)[0] > 0


EVERY = list(range(4))


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, r"needs skip_attention and skip_mlp, or sets=<file>; neither given"),
        ({"skip_mlp": [1], "sets": "x.json"}, r"both given"),
        ({"skip_attention": [], "skip_mlp": []}, r"that draft is the target itself"),
        ({"skip_attention": [4]}, r"skip_attention names layer 4; tiny has 4: allowed are 0 to 3"),
        ({"skip_mlp": [-1]}, r"skip_mlp names layer -1"),
        ({"skip_attention": EVERY, "skip_mlp": EVERY}, r"nothing is left to draft with"),
        ({"skip_attention": "all"}, r"skip_attention"),
        ({"skip_layers": [1]}, r"no option 'skip_layers'"),
        ({"sets": "no-such-file.json"}, r"sets=no-such-file.json cannot be read"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        build_drafter("layer_skip", TARGET, **options)


def test_a_written_set_is_read_by_its_target_and_by_no_other(tmp_path):
    skipped = SkipSet.of([2, 0], [1])
    write_set(tmp_path / "layer_skip.json", skipped, TARGET, {"search": "random"}, {"alpha": 0.5})
    assert read_set(tmp_path, TARGET) == skipped
    assert build_drafter("layer_skip", TARGET, sets=str(tmp_path)).skipped == skipped
    assert [path.name for path in tmp_path.iterdir()] == ["layer_skip.json"]
    with pytest.raises(UserError, match=r"was chosen for 'tiny' with fingerprint .* 'other' has"):
        read_set(tmp_path, wrap_target(tiny_llama(seed=1), name="other"))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kind": "eagle3"}, "no JSON file with kind layer_skip"),
        ({"skip_mlp": [0.5]}, "two lists"),
        ({"skip_mlp": None}, "two lists"),
        ({"skip_mlp": [9]}, "names layer 9"),
        ({"skip_heads": [1]}, "unknown key 'skip_heads'"),
    ],
)
def test_a_damaged_set_is_refused(tmp_path, change, message):
    path = tmp_path / "set.json"
    write_set(path, SkipSet.of([1], []), TARGET, {}, {})
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=message):
        read_set(path, TARGET)
    path.write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        read_set(path, TARGET)
