"""Medusa's and Hydra's training: every head's labels where they belong, and held-out τ that is what decoding gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tiny_models
from selfspec import UserError, decode, load_drafter, wrap_target
from selfspec.target import Target
from selfspec.training.batches import Batch, Batches
from selfspec.training.data import Sample
from selfspec.training.draft_vocab import write_draft_vocab
from selfspec.training.features import hidden_states
from selfspec.training.heads import HeadsTrainee
from selfspec.training.job import train_draft
from selfspec.training.losses import coarse_cross_entropy, restrict
from selfspec.training.rounds import starts_of
from selfspec.training.teacher import distributions
from selfspec.training.trainee import build_trainee
from selfspec.training.trainer import TrainConfig

KINDS = ("medusa", "hydra")
DRAFTS = (("medusa", {}), ("hydra", {}), ("hydra", {"prefix": True}))
HEADS = 3
SAMPLES = [Sample(i, list(range(20 + i, 40 + 2 * i)), (1, 6, 15)[i], 0.0, False) for i in range(3)]


def batch_of(target: Target, samples: list[Sample], row_tokens: int, batch_rows: int = 1) -> Batch:
    features = hidden_states(target, samples, [target.num_layers])
    teachers = distributions(target, samples, 8)
    batches = Batches(samples, teachers, batch_rows=batch_rows, row_tokens=row_tokens, seed=0, features=features)
    return next(batches.once())


def vocabulary(target: Target, folder: Path) -> str:
    ids = np.asarray([257, *range(256, 30, -2)])
    path = folder / "vocab.safetensors"
    write_draft_vocab(path, ids, np.ones(300), target.fingerprint)
    return str(path)


def stirred(trainee: HeadsTrainee) -> HeadsTrainee:
    """Its weights moved from where they begin, each differently."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainee.module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return trainee


def expected_rounds(samples: list[Sample]) -> list[tuple[int, int, int, int]]:
    """(begin of the sample, p, head, answer token) of everything that is supervised, in a row of samples."""
    found, begin = [], 0
    for sample in samples:
        for answer in range(sample.answer_len):
            p = sample.prompt_len - 2 + answer
            heads = range(min(HEADS, sample.answer_len - answer)) if p >= 0 else ()
            found += [(begin, begin + p, head, answer + head) for head in heads]
        begin += len(sample.token_ids)
    return found


@pytest.mark.parametrize("kind, more", DRAFTS)
def test_the_gradient_begins_right_before_the_last_prompt_token_and_reaches_every_head(
    chat_target: Target, kind: str, more: dict
):
    trainee = stirred(build_trainee(kind, chat_target, {"num_heads": HEADS, "num_blocks": 2, **more}))
    batch, kept = batch_of(chat_target, SAMPLES, row_tokens=80), []
    states = trainee.states

    def recorded(hidden_NM, batch, starts):
        kept.append((states(hidden_NM, batch, starts), starts))
        kept[0][0].retain_grad()
        return kept[0][0]

    trainee.states = recorded
    trainee.loss(batch).backward()
    found, starts = kept[0]
    reached_KN = found.grad.abs().sum(-1) > 0
    got = {(int(starts.at_N[n]), head) for head, n in reached_KN.nonzero().tolist()}
    assert got == {(p, head) for _, p, head, _ in expected_rounds(SAMPLES)}
    assert (20 + 6 - 2, 0) in got and (20 + 6 - 3, 0) not in got, "the second sample begins at 20, its answer 6 later"
    parameters = list(trainee.module.parameters())
    assert len({p.data_ptr() for p in parameters}) == len(parameters)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in parameters)


@pytest.mark.parametrize("options", [{}, {"own_head": True}, {"d_vocab": 60}, {"own_head": True, "d_vocab": 60}])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_loss_is_each_heads_own_on_the_distribution_it_drafts_from(
    chat_target: Target, kind: str, options: dict, tmp_path: Path
):
    if "d_vocab" in options:
        options = {**options, "draft_vocab": vocabulary(chat_target, tmp_path)}
    trainee = stirred(build_trainee(kind, chat_target, {"num_heads": HEADS, "num_blocks": 2, "decay": 0.5, **options}))
    batch, total = batch_of(chat_target, SAMPLES, row_tokens=80), 0.0
    rows = {}  # (begin of the sample, answer token) -> teacher row
    begin = row = 0
    for sample in SAMPLES:
        rows |= {(begin, answer): row + answer for answer in range(sample.answer_len)}
        begin, row = begin + len(sample.token_ids), row + sample.answer_len
    text, features = batch.token_ids_BT[0], batch.features_BTF[0]
    for begin, p, head, answer in expected_rounds(SAMPLES):
        hidden = chat_target.norm(features[p][None].float())
        if kind == "medusa":
            state = trainee.module.states(hidden)[head]
        else:
            read = [chat_target.embed(text[p + 1 + j][None]) for j in range(head + 1)]
            state = trainee.module.state(head, torch.cat([hidden, *read], -1))
        matrix = trainee.module.lm_head[head].weight if options.get("own_head") else trainee.head_VM
        at = rows[begin, answer]
        ids, logp = batch.teacher_ids_NK[at][None], batch.teacher_logp_NK[at][None]
        if trainee.place_V is not None:
            ids, logp = restrict(ids, logp, trainee.place_V)
        total = total + 0.5**head * float(coarse_cross_entropy(state @ matrix.T, ids, logp))
    assert float(trainee.loss(batch)) == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("kind, more", DRAFTS)
@torch.no_grad()
def test_heads_begin_as_the_targets_own_prediction(chat_target: Target, kind: str, more: dict):
    trainee = build_trainee(kind, chat_target, {"num_heads": HEADS, "num_blocks": 2, **more})
    batch = batch_of(chat_target, SAMPLES, row_tokens=80)
    starts = starts_of(batch, HEADS)
    states_KNM = trainee._states(batch, starts)
    hidden_NM = chat_target.norm(batch.features_BTF.flatten(0, 1)[starts.at_N].float())
    assert torch.equal(states_KNM, hidden_NM.expand_as(states_KNM))


@pytest.mark.parametrize("kind, more", [*DRAFTS, ("medusa", {"own_head": True})])
def test_held_out_tau_on_greedy_text_is_what_decoding_gets(chat_target: Target, kind: str, more: dict, tmp_path):
    """Trained on the very text, so that some drafts are right; saved, loaded, and decoded with."""
    prompts = [tiny_models.prompt_ids(length, seed=length, vocab_size=250) for length in (2, 5, 9, 30, 4)]
    answers = decode(chat_target, None, prompts, max_new_tokens=40, max_batch_rows=5)
    samples = [
        Sample(i, prompt + output.token_ids, len(prompt), 0.0, False)
        for i, (prompt, output) in enumerate(zip(prompts, answers, strict=True))
    ]
    trainee = build_trainee(kind, chat_target, {"num_heads": HEADS, "num_blocks": 2, **more})
    batch = batch_of(chat_target, samples, row_tokens=96, batch_rows=4)
    optimizer = torch.optim.Adam(trainee.module.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        (trainee.loss(batch) / batch.weight_N.sum()).backward()
        optimizer.step()
    with torch.no_grad():
        for parameter in trainee.module.parameters():
            parameter.copy_(parameter.bfloat16())
    trainee.save(tmp_path)
    validation = trainee.validate([batch], set(range(len(samples))))
    drafter = load_drafter(tmp_path, chat_target)
    outputs = decode(chat_target, drafter, prompts, max_new_tokens=40, lookahead=HEADS, max_batch_rows=2)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in answers]
    assert validation.emitted == sum(len(answer.token_ids) for answer in answers)
    assert validation.rounds == sum(len(output.rounds) for output in outputs)
    assert validation.summary()["greedy_tau"] > 1.3, "or this test would say little"


@pytest.mark.parametrize("kind", KINDS)
def test_training_lowers_the_loss_and_leaves_a_draft(
    chat_target: Target, kind: str, data_folder: Callable[..., Path], tmp_path: Path
):
    config = TrainConfig(
        steps=30,
        batch_rows=2,
        row_tokens=48,
        learning_rate=3e-3,
        warmup_steps=3,
        autocast=False,
        num_kept=8,
        log_every=1,
        validate_every=15,
        checkpoint_every=15,
        loss="lk_hybrid",
    )
    before = {name: p.clone() for name, p in chat_target.hf_model.named_parameters()}
    options = {"num_heads": HEADS, "draft_vocab": vocabulary(chat_target, tmp_path), "d_vocab": 60}
    summary = train_draft(chat_target, kind, options, config, data_folder(), tmp_path / "o", "c", lambda _: None)
    assert all(torch.equal(before[name], p) for name, p in chat_target.hf_model.named_parameters())
    log = [json.loads(line) for line in (tmp_path / "o" / "log.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in log if "loss" in record]
    assert sum(losses[-4:]) < 0.95 * sum(losses[:4])
    assert len(summary["greedy_acceptance_by_position"]) == HEADS and summary["greedy_tau"] >= 1
    assert len([alpha for alpha in summary["alpha_by_position"] if alpha is not None]) == HEADS
    assert load_file(tmp_path / "o" / "model.safetensors")["token_ids"].shape == (60,)
    assert load_drafter(tmp_path / "o", chat_target).max_drafted == HEADS


@pytest.mark.parametrize("kind", KINDS)
def test_impossible_options_are_user_errors(chat_target: Target, kind: str):
    for options, match in (
        ({"num_heads": 0}, "num_heads=0 must be at least 1"),
        ({"num_blocks": 0}, "num_blocks=0 must be at least 1"),
        ({"decay": 0.0}, "decay=0.0 must be above 0"),
        ({"prefix": True} if kind == "medusa" else {"prefixes": True}, f"draft.prefix.* is no option of {kind}"),
        ({"heads": 3}, f"draft.heads is no option of {kind}"),
        ({"d_vocab": 5}, "together"),
    ):
        with pytest.raises(UserError, match=match):
            build_trainee(kind, chat_target, options)


def test_a_target_that_caps_its_logits_needs_output_matrices_of_the_heads_own():
    target = wrap_target(tiny_models.tiny_model("gemma2"))
    with pytest.raises(UserError, match="own_head=true"):
        build_trainee("medusa", target, {})
    build_trainee("medusa", target, {"own_head": True})
