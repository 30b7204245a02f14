"""The exit_adapter drafter: lossless, nothing run twice, and its drafts are those of its layer run from scratch."""

from __future__ import annotations

import pytest
import torch
from layer_drafts import features_of, random_draft, random_trainee
from torch import nn

from selfspec import Decoder, Sampling, UserError, decode, load_drafter, wrap_target
from selfspec.target.packed import PackedLinear
from selfspec.training.trainee import build_trainee
from tiny_models import FAMILIES, prompt_ids, tiny_llama, tiny_model

pytestmark = pytest.mark.usefixtures("small_chunks")

FEW, EXIT = 7, 2


@pytest.fixture(scope="module")
def target():
    return wrap_target(tiny_llama(vocab_size=FEW), name="tiny")


@pytest.fixture(
    scope="module",
    params=[(None, True), (4, True), (None, False)],
    ids=["all_tokens", "reduced", "attention_alone"],
)
def draft(request, target, tmp_path_factory):
    """Trainee and drafter of the same weights."""
    folder = tmp_path_factory.mktemp("exit_adapter")
    trainee = random_trainee(
        "exit_adapter", target, folder, d_vocab=request.param[0], exit_layer=EXIT, feed_forward=request.param[1]
    )
    trainee.save(folder)
    return trainee, load_drafter(folder, target)


def prompt(length: int) -> list[int]:
    return prompt_ids(length, seed=length, vocab_size=FEW)


@torch.no_grad()
def from_scratch(target, trainee, context: list[int], num_drafted: int) -> list[int]:
    """By transformers' own layer over the whole text, once per drafted token."""
    drafted: list[int] = []
    layer, norm = (trainee.module.get_submodule(name) for name in ("layer", "norm"))
    layer.self_attn.layer_idx = 0
    for _ in range(num_drafted):
        ids = [*context, *drafted]
        hidden = features_of(target, ids, (trainee.shape.exit_layer,))
        pass_ = target.make_cache(1, len(ids)).open(torch.arange(len(ids))[None], len(ids))
        hidden = layer(
            hidden,
            attention_mask=pass_.mask(target.windows[-1], target.queries_per_group, hidden.dtype),
            position_ids=pass_.positions_BT,
            position_embeddings=target.rotary_at(target.num_layers - 1, pass_, hidden),
            **{target._cache_argument: pass_},
        )
        logits = target.unembed(norm(hidden[:, -1]))[0]
        if trainee.token_ids is not None:
            logits[[token for token in range(len(logits)) if token not in trainee.token_ids.tolist()]] = -torch.inf
        drafted.append(int(logits.argmax()))
    return drafted


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
def test_drafts_are_those_of_the_layer_run_from_scratch(target, draft, num_drafted, rows, cache):
    trainee, drafter = draft
    prompts = [prompt(length) for length in (2, 1, 65, 130)]
    watched = Watched(target, trainee, prompts)
    options = dict(max_new_tokens=10, ignore_eos=True)
    on = dict(lookahead=num_drafted, max_batch_rows=rows, cache=cache, on_round=watched)
    outputs = decode(target, drafter, prompts, **options, **on)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in decode(target, None, prompts, **options)]
    assert watched.accepted and watched.rejected


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_its_layer_is_of_the_targets_kind(family, tmp_path):
    """Biases, norms on the heads, head sizes, windows (8 positions here): whatever the family's last layer has."""
    target = wrap_target(FAMILIES[family](vocab_size=FEW), name=family)
    trainee = random_trainee("exit_adapter", target, tmp_path, exit_layer=EXIT)
    trainee.save(tmp_path)
    watched = Watched(target, trainee, [prompt(20)])
    drafter = load_drafter(tmp_path, target)
    decode(target, drafter, [prompt(20)], max_new_tokens=12, ignore_eos=True, lookahead=3, on_round=watched)


@pytest.mark.parametrize("num_drafted", [1, 4])
def test_the_targets_own_last_layer_behind_the_exit_before_it_drafts_what_the_target_says(
    target, tmp_path, num_drafted
):
    """After full acceptance nothing may be missing in its cache: every round is fully accepted here."""
    with torch.no_grad():  # what is saved in bfloat16 has to be the target's
        exact = wrap_target(tiny_llama(vocab_size=FEW), name="rounded")
        for parameter in exact.hf_model.parameters():
            parameter.copy_(parameter.bfloat16())
    trainee = build_trainee("exit_adapter", exact, {"exit_layer": target.num_layers - 1})
    trainee.save(tmp_path)
    output = decode(
        exact,
        load_drafter(tmp_path, exact),
        [prompt(9)],
        max_new_tokens=40,
        lookahead=num_drafted,
        ignore_eos=True,
    )[0]
    assert all(record.num_accepted == num_drafted for record in output.rounds[:-1])


def test_a_further_turn_of_a_chat_goes_on_from_what_is_there(target, draft):
    trainee, drafter = draft
    decoder = Decoder(target, drafter, capacity=160)
    first = prompt(20)
    output = decoder.decode([first], max_new_tokens=10, ignore_eos=True, reuse=True)[0]
    text = first + output.token_ids
    for turn, reused in (([*text, *prompt(9)], len(text) - 1), ([*text[:12], (text[12] + 1) % FEW, *prompt(5)], 12)):
        watched = Watched(target, trainee, [turn])
        again = decoder.decode([turn], max_new_tokens=10, ignore_eos=True, reuse=True, on_round=watched)[0]
        assert again.num_reused_tokens == reused
        assert again.token_ids == decode(target, None, [turn], max_new_tokens=10, ignore_eos=True)[0].token_ids


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


def test_every_layer_below_the_exit_and_its_own_run_each_token_once(target, draft):
    _, drafter = draft
    counts: dict[str, int] = {"own": 0}
    run_layers = target.run_layers

    def counting(hidden_BTM, first, last, pass_):
        for layer in range(first, last):
            counts[layer] = counts.get(layer, 0) + hidden_BTM.shape[1]
        return run_layers(hidden_BTM, first, last, pass_)

    class Own:
        def __init__(self, layer):
            self._layer = layer

        def __call__(self, hidden_BTM, pass_):
            counts["own"] += hidden_BTM.shape[1]
            return self._layer(hidden_BTM, pass_)

        def __getattr__(self, name):
            return getattr(self._layer, name)

    own = drafter._layer
    target.run_layers, drafter._layer = counting, Own(own)
    try:
        output = decode(target, drafter, [prompt(65)], max_new_tokens=20, ignore_eos=True, lookahead=3)[0]
    finally:
        del target.run_layers
        drafter._layer = own
    assert len(set(counts.values())) == 1
    assert counts["own"] == 64 + 4 * len(output.rounds)


def test_its_memory_is_foretold(target, draft):
    trainee, drafter = draft
    weights, state = drafter.draft_bytes(3, 100)
    assert state == drafter._layer.cache_bytes(3, 100) > 0
    linear = [m for m in trainee.module.get_submodule("layer").modules() if isinstance(m, nn.Linear)]
    saved = [p.detach().bfloat16().float() for m in linear for p in m.parameters()]
    head = 0 if trainee.token_ids is None else 4 * target.width * 4 + trainee.token_ids.nbytes
    assert weights == sum(PackedLinear(p, None).nbytes for p in saved) + head


def test_what_does_not_fit_is_refused(target, tmp_path):
    folder = random_draft("exit_adapter", target, tmp_path / "a", exit_layer=EXIT)
    with pytest.raises(UserError, match="fingerprint"):
        load_drafter(folder, wrap_target(tiny_llama(vocab_size=FEW, seed=1)))
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"exit_layer": 2', '"exit_layer": 4'))
    with pytest.raises(UserError, match="exit_layer=4"):
        load_drafter(folder, target)
    (folder / "config.json").write_text(config.replace('"copied_layer": 3,', ""))
    with pytest.raises(UserError, match="lacks 'copied_layer'"):
        load_drafter(folder, target)
    other = wrap_target(tiny_model("olmo2", vocab_size=FEW))
    (folder / "config.json").write_text(config.replace(target.fingerprint, other.fingerprint))
    with pytest.raises(UserError, match="cannot run a layer of model type 'olmo2'"):
        load_drafter(folder, other)
