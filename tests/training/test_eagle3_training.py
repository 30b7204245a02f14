"""EAGLE-3's training: labels where they belong, and an unrolled step that is what drafting one token at a time does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tiny_models
from selfspec.drafters.eagle3_head import Eagle3Head
from selfspec.errors import UserError
from selfspec.target import Target, wrap_target
from selfspec.training.batches import Batch, Batches
from selfspec.training.data import Sample
from selfspec.training.eagle3 import Eagle3Trainee, UnrolledHead, build_eagle3
from selfspec.training.features import hidden_states
from selfspec.training.job import train_draft
from selfspec.training.rounds import SLOTS, Slots, slots_of, starts_of
from selfspec.training.teacher import distributions
from selfspec.training.trainer import TrainConfig

SAMPLES = [Sample(i, list(range(20 + i, 40 + 2 * i)), 6 + i, 0.0, False) for i in range(3)]
OPTIONS = {"feature_layers": (0, 1, 2), "num_steps": 3}


@pytest.fixture
def trainee(chat_target: Target) -> Eagle3Trainee:
    return build_eagle3(chat_target, OPTIONS)


def batch_of(target: Target, samples: list[Sample], row_tokens: int, batch_rows: int = 1) -> Batch:
    features = hidden_states(target, samples, [0, 1, 2])
    teachers = distributions(target, samples, 8)
    batches = Batches(samples, teachers, batch_rows=batch_rows, row_tokens=row_tokens, seed=0, features=features)
    return next(batches.once())


def everywhere(batch: Batch) -> Slots:
    rows, width = batch.token_ids_BT.shape
    return Slots(torch.arange(width).expand(rows, width))


def draft_one_by_one(
    head: Eagle3Head, features_TF: Tensor, embedded_TM: Tensor, start: int, steps: int
) -> list[Tensor]:
    """What a drafter does, naively: keys and values of the text up to `start`, then one appended per drafted token."""
    layer = UnrolledHead(head)
    repeat = head.shape.num_heads // head.shape.num_kv_heads
    hidden_1TM = head.fc(features_TF[: start + 1])[None]
    positions = torch.arange(start + 1)[None]
    query, keys, values, _ = layer.enter(embedded_TM[None, 1 : start + 2], hidden_1TM, positions)
    query, hidden, outputs = query[:, -1:], hidden_1TM[:, -1:], []
    for j in range(steps):
        if j:
            position = torch.tensor([[start + j]])
            query, key, value, _ = layer.enter(embedded_TM[None, start + 1 + j][:, None], hidden, position)
            keys, values = torch.cat([keys, key], 1), torch.cat([values, value], 1)
        k, v = (x.repeat_interleave(repeat, 2).transpose(1, 2) for x in (keys, values))
        attended = torch.nn.functional.scaled_dot_product_attention(query.transpose(1, 2), k, v).transpose(1, 2)
        hidden = layer.leave(hidden, attended)
        outputs.append(hidden[0, 0])
    return outputs


def test_unrolled_training_steps_are_what_drafting_one_by_one_computes(chat_target: Target, trainee: Eagle3Trainee):
    batch = batch_of(chat_target, SAMPLES, row_tokens=80)
    with torch.no_grad():
        steps = [hidden_BTM[0] for hidden_BTM in trainee._states(batch, everywhere(batch))]
        for document, sample in enumerate(SAMPLES):
            begin = int((batch.document_BT[0] == document).nonzero()[0])
            length = len(sample.token_ids)
            features = batch.features_BTF[0, begin : begin + length].float()
            embedded = chat_target.embed(torch.tensor(sample.token_ids))
            for start in (0, 5, length - 4):
                alone = draft_one_by_one(trainee.head, features, embedded, start, 3)
                for j in range(3):
                    torch.testing.assert_close(steps[j][begin + start], alone[j], rtol=1e-4, atol=1e-5)


def test_labels_begin_with_the_first_answer_token_and_never_leave_the_sample(
    chat_target: Target, trainee: Eagle3Trainee
):
    batch = batch_of(chat_target, SAMPLES, row_tokens=80)
    begin = 0
    expected: list[list[tuple[int, int]]] = [[], [], []]
    row = 0
    for sample in SAMPLES:
        for answer in range(sample.answer_len):  # the round that drafts this answer token first
            for j in range(min(3, sample.answer_len - answer)):
                expected[j].append((begin + sample.prompt_len - 2 + answer, row + answer + j))
        begin, row = begin + len(sample.token_ids), row + sample.answer_len
    for j, (_, at, rows) in enumerate(trainee._steps(batch)):
        assert list(zip(at.tolist(), rows.tolist(), strict=True)) == expected[j]


def test_states_where_rounds_begin_are_those_of_unrolling_everywhere(chat_target: Target, trainee: Eagle3Trainee):
    """Two rows with different numbers of rounds, the fuller one above a multiple of the slots."""
    samples = [*SAMPLES, Sample(3, list(range(20, 20 + SLOTS + 12)), 4, 0.0, False)]
    batch = batch_of(chat_target, samples, row_tokens=SLOTS + 16, batch_rows=2)
    starts = starts_of(batch, 3)
    slots, slot_N = slots_of(starts, batch)
    begun = starts.at_N[starts.usable_KN[0]]
    assert slots.at_BS.shape == (2, 2 * SLOTS) and len(slot_N[slot_N >= 0].unique()) == len(begun)
    with torch.no_grad():
        all_states = trainee._states(batch, everywhere(batch))
        for (hidden_NM, at, _), hidden_BTM in zip(trainee._steps(batch), all_states, strict=True):
            torch.testing.assert_close(hidden_NM, hidden_BTM.flatten(0, 1)[at], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("own_head", [True, False])
def test_loss_reaches_every_parameter_and_training_lowers_it(
    chat_target: Target, data_folder: Callable[..., Path], tmp_path: Path, own_head: bool
):
    options = {**OPTIONS, "own_head": own_head}
    trainee = build_eagle3(chat_target, options)
    trainee.loss(batch_of(chat_target, SAMPLES, row_tokens=80)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trainee.module.parameters())
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
    )
    summary = train_draft(chat_target, "eagle3", options, config, data_folder(), tmp_path / "o", "c", lambda _: None)
    log = [json.loads(line) for line in (tmp_path / "o" / "log.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in log if "loss" in record]
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    assert len(summary["greedy_acceptance_by_position"]) == 3 and summary["greedy_tau"] >= 1
    assert json.loads((tmp_path / "o" / "config.json").read_text())["feature_layers"] == [0, 1, 2]


def test_a_head_begins_as_the_targets_last_layer_on_its_highest_features(chat_target: Target):
    """But for what it reads of the next token, which begins small."""
    trainee = build_eagle3(chat_target, {"feature_layers": (0, 0, 1), "init": "target"})
    batch = batch_of(chat_target, SAMPLES, row_tokens=80)
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(trainee.head.layer.self_attn, name).weight[:, : chat_target.width] = 0
        features = batch.features_BTF[..., [*range(32), *range(32), *range(32, 64)]]
        states = trainee.head.norm(trainee._states(replace(batch, features_BTF=features), everywhere(batch))[0])
        expected = chat_target.norm(batch.features_BTF[..., 64:].float())
    real = batch.document_BT >= 0
    torch.testing.assert_close(states[real], expected[real], rtol=5e-2, atol=5e-2)  # features are kept in bfloat16
    again = build_eagle3(chat_target, {"feature_layers": (0, 0, 1), "init": "random"})
    assert (again.head.layer.mlp.up_proj.weight - trainee.head.layer.mlp.up_proj.weight).abs().max() > 0.1


def test_impossible_options_are_user_errors(chat_target: Target):
    for options, match in (
        ({}, "give draft.feature_layers"),
        ({"feature_layers": (0, 1, 9)}, "from 0 to 2"),
        ({"feature_layers": (0, 1, 2), "num_steps": 0}, "at least 1"),
        ({"feature_layers": (0, 1, 2), "intermediate_size": -3}, "intermediate_size=-3 must be at least 1"),
        ({"layers": 3}, "no option"),
        ({"feature_layers": (0, 1, 2), "init": "zero"}, "Allowed: target, random"),
        ({"feature_layers": (0, 1, 2), "init": "target", "intermediate_size": 8}, "Use draft.init=random"),
        ({"feature_layers": (0, 1, 2), "d_vocab": 5}, "together"),
    ):
        with pytest.raises(UserError, match=match):
            build_eagle3(chat_target, options)
    four = wrap_target(tiny_models.tiny_llama(num_layers=6), None)
    assert build_eagle3(four, {}).feature_layers == (2, 3, 3)
