"""The drafters that read their own output (eagle3, mtp): lossless, and their drafts are those of the layer run from
scratch on true hidden states every round.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from layer_drafts import chained_drafts, features_of, random_draft, random_trainee
from safetensors.torch import load_file, save_file
from torch import Tensor

from selfspec import Decoder, Sampling, UserError, decode, load_drafter, wrap_target
from selfspec.decoding.drafting import Drafting
from selfspec.decoding.round import decode_round, prefill
from selfspec.decoding.rows import Rows
from selfspec.decoding.sampler import Sampler
from selfspec.decoding.stopwatch import Stopwatch
from selfspec.drafters.draft_layer_chain import ChainState
from selfspec.lookahead import Plan
from selfspec.sampling import build_rule, build_transforms
from selfspec.target.packed import PackedLinear
from selfspec.training.eagle3 import Eagle3Trainee
from tiny_models import FAMILIES, prompt_ids, tiny_llama

pytestmark = pytest.mark.usefixtures("small_chunks")

EAGLE3 = {"feature_layers": (0, 2, 4), "num_steps": 2}
FEW = 7  # tokens in all, so that a random draft is often right
DRAFTS = {
    "eagle3": ("eagle3", EAGLE3, None),
    "eagle3_reduced": ("eagle3", EAGLE3, 4),
    "eagle3_through_the_targets_head": ("eagle3", {**EAGLE3, "own_head": False}, 4),
    "eagle3_through_the_targets_whole_head": ("eagle3", {**EAGLE3, "own_head": False}, None),
    "mtp": ("mtp", {"num_steps": 2}, None),
    "mtp_reduced": ("mtp", {"num_steps": 2}, 4),
}


@pytest.fixture(scope="module")
def target():
    return wrap_target(tiny_llama(vocab_size=FEW), name="tiny")


@pytest.fixture(scope="module", params=sorted(DRAFTS))
def draft(request, target, tmp_path_factory):
    """Trainee and drafter of the same weights."""
    kind, options, d_vocab = DRAFTS[request.param]
    folder = tmp_path_factory.mktemp(kind)
    trainee = random_trainee(kind, target, folder, d_vocab=d_vocab, **options)
    trainee.save(folder)
    return trainee, load_drafter(folder, target)


def prompt(length: int) -> list[int]:
    return prompt_ids(length, seed=length, vocab_size=FEW)


def from_scratch(target, trainee, context: list[int], num_drafted: int) -> list[int]:
    """Greedy drafts, all of it computed anew."""
    width = len(trainee.feature_layers) * target.width
    hidden = features_of(target, context[:-1], trainee.feature_layers) if len(context) > 1 else torch.zeros(1, 0, width)
    own = isinstance(trainee, Eagle3Trainee)
    norm = trainee.head.norm if own else trainee.mtp.norm
    reduced = trainee.token_ids is not None

    def trained_logits(normed: Tensor) -> Tensor:
        if trainee.options.own_head:
            return trainee.head.lm_head(normed)
        return trainee.head.head_map(normed) @ target.head_rows(trainee.token_ids).T

    def logits_of(hidden: Tensor) -> Tensor:
        logits = trained_logits(norm(hidden)) if own else target.unembed(norm(hidden))
        if not reduced:
            return logits
        spread = torch.full((1, 1, target.vocab_size), -torch.inf)
        spread[..., trainee.token_ids] = logits if own else logits[..., trainee.token_ids]
        return spread

    hidden = trainee.head.fc(hidden) if own else hidden
    window = None if own else target.windows[-1]
    return chained_drafts(target, trainee.unrollable, hidden, logits_of, context, num_drafted, window)


class Watched:
    """Compares every round's drafts with those made from scratch."""

    def __init__(self, target, trainee, prompts):
        self.target, self.trainee = target, trainee
        self.texts = [list(ids) for ids in prompts]
        self.accepted, self.rejected = 0, 0

    def __call__(self, event):
        text = self.texts[event.request.index]
        assert event.drafted_ids == from_scratch(self.target, self.trainee, text, len(event.drafted_ids))
        text += event.emitted_ids
        self.accepted += event.record.num_accepted
        self.rejected += event.record.num_accepted < event.record.num_drafted


@pytest.mark.parametrize("num_drafted, rows, cache", [(1, 3, "contiguous"), (2, 1, "contiguous"), (5, 3, "paged")])
@torch.inference_mode()
def test_drafts_are_those_of_the_head_run_from_scratch_every_round(target, draft, num_drafted, rows, cache):
    trainee, drafter = draft
    prompts = [prompt(length) for length in (2, 1, 65, 130)]
    watched = Watched(target, trainee, prompts)
    options = dict(max_new_tokens=10, ignore_eos=True)
    outputs = decode(
        target,
        drafter,
        prompts,
        lookahead=num_drafted,
        max_batch_rows=rows,
        cache=cache,
        on_round=watched,
        **options,
    )
    assert [o.token_ids for o in outputs] == [o.token_ids for o in decode(target, None, prompts, **options)]
    assert watched.accepted and watched.rejected


def test_a_further_turn_of_a_chat_leaves_nothing_of_the_text_it_replaced(target, draft):
    """The last token that stays was followed by another one before: its keys and values have to be made anew."""
    trainee, drafter = draft
    decoder = Decoder(target, drafter, capacity=160)
    first = prompt(20)
    output = decoder.decode([first], max_new_tokens=10, ignore_eos=True, reuse=True)[0]
    text = first + output.token_ids
    other = [(text[12] + 1) % FEW]
    for turn, reused in (([*text, *prompt(9)], len(text) - 1), ([*text[:12], *other, *prompt(5)], 11)):
        watched = Watched(target, trainee, [turn])
        again = decoder.decode([turn], max_new_tokens=10, ignore_eos=True, reuse=True, on_round=watched)[0]
        assert again.num_reused_tokens == reused
        assert again.token_ids == decode(target, None, [turn], max_new_tokens=10, ignore_eos=True)[0].token_ids


@pytest.mark.parametrize("num_drafted", [1, 4])
@torch.inference_mode()
def test_state_after_rounds_is_that_of_a_prefill_of_the_committed_text(target, draft, num_drafted):
    _, drafter = draft
    sampler = Sampler(build_transforms(Sampling(), None, FEW), build_rule("auto", Sampling()), seed=0)
    rows, watch = Rows(target, 2, 100), Stopwatch(target.device)
    drafter.start(rows)
    for row, ids in enumerate((prompt(9), prompt(12))):
        rows.place(row, ids, 60, row)
        prefill(target, drafter, rows, row, 0, len(ids) - 1)
    watch.start()
    for _ in range(7):
        decode_round(target, drafter, rows, Drafting(rows, Plan(num_drafted), sampler), sampler, watch)
    for row in range(2):
        length = int(rows.lengths_B[row])
        text = rows.tokens_BS[row, : length + 1].tolist()
        fresh = Rows(target, 1, 100)
        drafter.start(fresh)
        fresh.place(0, text, 10, 0)
        prefill(target, drafter, fresh, 0, 0, length)
        used, new = rows.draft_state, fresh.draft_state
        assert isinstance(used, ChainState) and isinstance(new, ChainState)
        torch.testing.assert_close(used.output_BM[row], new.output_BM[0], rtol=1e-4, atol=1e-4)
        for ours, theirs in zip(
            used.cache.visible(0, slice(row, row + 1), 64), new.cache.visible(0, slice(0, 1), 64), strict=True
        ):
            torch.testing.assert_close(ours[:, :, :length], theirs[:, :, :length], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_idle_rows_keep_their_state(target, draft):
    _, drafter = draft
    sampler = Sampler(build_transforms(Sampling(), None, FEW), build_rule("auto", Sampling()), seed=0)
    rows, watch = Rows(target, 2, 100), Stopwatch(target.device)
    drafter.start(rows)
    for row in range(2):
        rows.place(row, prompt(9 + row), 60, row)
        prefill(target, drafter, rows, row, 0, 8 + row)
    rows.pause(0)
    watch.start()
    state = rows.draft_state
    before = state.output_BM.clone(), state.cache.visible(0, slice(0, 1), 64)[0].clone()
    decode_round(target, drafter, rows, Drafting(rows, Plan(3), sampler), sampler, watch)
    assert torch.equal(state.output_BM[0], before[0][0]) and not torch.equal(state.output_BM[1], before[0][1])
    assert torch.equal(state.cache.visible(0, slice(0, 1), 64)[0], before[1])


RULES = {
    "greedy": dict(),
    "rejection": dict(sampling=Sampling(temperature=0.9, top_p=0.95)),
    "coupled": dict(sampling=Sampling(temperature=0.9), acceptance="coupled"),
    "block": dict(sampling=Sampling(temperature=0.9), acceptance="block"),
    "typical": dict(sampling=Sampling(temperature=0.9), acceptance="typical"),
}


@pytest.mark.parametrize("rule", sorted(RULES))
def test_every_acceptance_rule_takes_its_drafts(target, draft, rule):
    _, drafter = draft
    prompts = [prompt(length) for length in (3, 1, 70)]
    options = dict(max_new_tokens=20, ignore_eos=True, **RULES[rule])
    outputs = decode(target, drafter, prompts, lookahead=3, max_batch_rows=2, **options)
    assert all(len(output.token_ids) == 20 for output in outputs)
    rounds = [record for output in outputs for record in output.rounds]
    assert sum(r.num_accepted for r in rounds) > 0 and any(r.num_accepted < r.num_drafted for r in rounds)
    if rule in ("greedy", "coupled"):
        expected = decode(target, None, prompts, **options)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_layers_of_every_family_draft_what_they_were_trained_to(family, kind, tmp_path):
    """mtp's has the family's biases, head norms and window (8 positions here); eagle3's is Llama's on every target."""
    target = wrap_target(FAMILIES[family](vocab_size=FEW), name=family)
    trainee = random_trainee(kind, target, tmp_path, **DRAFTS[kind][1])
    trainee.save(tmp_path)
    watched = Watched(target, trainee, [prompt(20)])
    on = dict(max_new_tokens=12, ignore_eos=True, lookahead=3, on_round=watched)
    decode(target, load_drafter(tmp_path, target), [prompt(20)], **on)


def test_its_memory_is_foretold(target, draft):
    _, drafter = draft
    weights, state = drafter.draft_bytes(3, 100)
    rows = Rows(target, 3, 100)
    drafter.start(rows)
    assert state == rows.draft_state.cache.kv_bytes + rows.draft_state.output_BM.nbytes
    trainee = draft[0]
    matrices = [p.detach().bfloat16().float() for p in trainee.module.parameters() if p.dim() == 2]  # as saved
    own_head = isinstance(trainee, Eagle3Trainee) and trainee.options.own_head
    if trainee.token_ids is not None and not own_head:
        matrices.append(target.head_weight_VM.detach()[trainee.token_ids])
    kept = sum(PackedLinear(matrix, None).nbytes for matrix in matrices)
    assert weights == kept + (0 if trainee.token_ids is None else trainee.token_ids.nbytes)


def damaged(target, folder: Path, config=None, weights=None) -> Path:
    random_draft("eagle3", target, folder, **EAGLE3)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in (weights or {}).items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_checkpoint_that_does_not_fit_is_refused(target, tmp_path):
    other = wrap_target(tiny_llama(vocab_size=FEW, seed=1), name="other")
    shape = json.loads((damaged(target, tmp_path / "whole") / "config.json").read_text())["shape"]
    cases = {
        "layers": (dict(config={"feature_layers": [0, 1]}), "three layers"),
        "deep": (dict(config={"feature_layers": [0, 1, 5]}), "from 0 to 4"),
        "missing": (dict(weights={"fc.weight": None}), "lacks fc.weight"),
        "unused": (dict(weights={"d2t": torch.zeros(3)}), "holds d2t"),
        "shape": (dict(weights={"fc.weight": torch.zeros(3, 3)}), r"fc.weight has shape \(3, 3\)"),
        "narrow": (dict(config={"shape": shape | {"head_dim": 4}}), "has shape"),
        "strange": (dict(config={"shape": shape | {"experts": 4}}), "not an eagle3 head's"),
        "vocab": (dict(config={"d_vocab": 3}), "d_vocab=3"),
        "kind": (dict(config={"kind": "exit_adapter"}), "lacks 'exit_layer'"),
    }
    for name, (change, message) in cases.items():
        with pytest.raises(UserError, match=message):
            load_drafter(damaged(target, tmp_path / name, **change), target)
    with pytest.raises(UserError, match="fingerprint"):
        load_drafter(tmp_path / "whole", other)
    folder = random_draft("mtp", target, tmp_path / "mtp")
    config = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"feature_layer": 3}, "feature_layer=3"),
        ({"hidden": "after_final_norm"}, "'after_final_norm'"),
        ({"copied_layer": 4}, "copied_layer=4"),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UserError, match=message):
            load_drafter(folder, target)
