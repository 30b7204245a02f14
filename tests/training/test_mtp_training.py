"""The mtp module's training: an unrolled step is what drafting one token at a time does, for every kind of layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from layer_drafts import random_trainee
from safetensors.torch import load_file

from selfspec.errors import UserError
from selfspec.target import Target, wrap_target
from selfspec.training.batches import Batch, Batches
from selfspec.training.data import Sample
from selfspec.training.features import hidden_states
from selfspec.training.job import train_draft
from selfspec.training.mtp import MtpTrainee
from selfspec.training.rounds import Slots
from selfspec.training.teacher import distributions
from selfspec.training.trainee import build_trainee
from selfspec.training.trainer import TrainConfig
from tiny_models import FAMILIES, tiny_model

SAMPLES = [Sample(i, list(range(20 + i, 40 + 2 * i)), 6 + i, 0.0, False) for i in range(3)]


def batch_of(target: Target) -> Batch:
    features = hidden_states(target, SAMPLES, [target.num_layers])
    teachers = distributions(target, SAMPLES, 8)
    return next(Batches(SAMPLES, teachers, batch_rows=1, row_tokens=80, seed=0, features=features).once())


def draft_one_by_one(target: Target, trainee: MtpTrainee, hidden_TM, token_ids, start: int, steps: int):
    """Keys and values of the text up to `start`, then one appended per drafted token; a window where the layer has
    one.
    """
    layer, window = trainee.unrollable, target.windows[-1]
    embedded_1TM = target.embed(torch.tensor(token_ids))[None]
    query, keys, values, residual = layer.enter(
        embedded_1TM[:, 1 : start + 2], hidden_TM[None, : start + 1], torch.arange(start + 1)[None]
    )
    outputs = []
    for j in range(steps):
        if j:
            position = torch.tensor([[start + j]])
            query, key, value, residual = layer.enter(embedded_1TM[:, start + 1 + j][:, None], outputs[-1], position)
            keys, values = torch.cat([keys, key], 1), torch.cat([values, value], 1)
        first = 0 if window is None else max(0, start + j + 1 - window)
        repeat = query.shape[2] // keys.shape[2]
        k, v = (x[:, first:].repeat_interleave(repeat, 2).transpose(1, 2) for x in (keys, values))
        last = query[:, -1:].transpose(1, 2)
        attended = torch.nn.functional.scaled_dot_product_attention(last, k, v).transpose(1, 2)
        outputs.append(layer.leave(residual[:, -1:], attended))
    return [output[0, 0] for output in outputs]


@pytest.mark.parametrize("family", sorted(FAMILIES))
@torch.no_grad()
def test_unrolled_training_steps_are_what_drafting_one_by_one_computes(family: str, tmp_path: Path):
    target = wrap_target(FAMILIES[family](num_layers=2), name=family)
    trainee = random_trainee("mtp", target, tmp_path, num_steps=3)
    assert isinstance(trainee, MtpTrainee)
    batch = batch_of(target)
    assert batch.features_BTF is not None
    states = trainee._states(batch, Slots(torch.arange(batch.token_ids_BT.shape[1])[None]))
    for document, sample in enumerate(SAMPLES):
        begin = int((batch.document_BT[0] == document).nonzero()[0])
        length = len(sample.token_ids)
        hidden = batch.features_BTF[0, begin : begin + length].float()
        for start in (0, 5, length - 4):
            alone = draft_one_by_one(target, trainee, hidden, sample.token_ids, start, 3)
            for j in range(3):
                torch.testing.assert_close(states[j][0, begin + start], alone[j], rtol=1e-4, atol=1e-4)


def test_loss_reaches_every_parameter_and_training_lowers_it_and_saves_the_module_alone(
    chat_target: Target, data_folder: Callable[..., Path], tmp_path: Path
):
    trainee = build_trainee("mtp", chat_target, {"num_steps": 3})
    trainee.loss(batch_of(chat_target)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trainee.module.parameters())
    before = {name: p.clone() for name, p in chat_target.hf_model.named_parameters()}
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
    summary = train_draft(chat_target, "mtp", {}, config, data_folder(), tmp_path / "o", "c", lambda _: None)
    log = [json.loads(line) for line in (tmp_path / "o" / "log.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in log if "loss" in record]
    assert sum(losses[-4:]) < 0.97 * sum(losses[:4])
    assert len(summary["greedy_acceptance_by_position"]) == 3
    assert all(torch.equal(before[name], p) for name, p in chat_target.hf_model.named_parameters())
    names = {f"layer.{name}" for name, _ in chat_target.hf_model.model.layers[0].named_parameters()}
    own = {"eh_proj.weight", "enorm.weight", "hnorm.weight", "norm.weight"}
    assert set(load_file(tmp_path / "o" / "model.safetensors")) == names | own
    saved = json.loads((tmp_path / "o" / "config.json").read_text())
    assert (saved["kind"], saved["feature_layer"], saved["hidden"]) == ("mtp", 2, "before_final_norm")


def test_a_module_can_begin_as_the_targets_last_layer_or_at_random(chat_target: Target):
    last = chat_target.hf_model.model.layers[-1]
    copied = build_trainee("mtp", chat_target, {"init": "target"}).module
    drawn = [build_trainee("mtp", chat_target, {"init": "random", "seed": seed}).module for seed in (0, 0, 1)]
    assert torch.equal(copied.layer.mlp.up_proj.weight, last.mlp.up_proj.weight)
    assert torch.equal(copied.eh_proj.weight[:, 32:], torch.eye(32))
    weights = [module.layer.mlp.up_proj.weight for module in drawn]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert float(weights[0].detach().std()) == pytest.approx(0.02, rel=0.1)


def test_impossible_options_are_user_errors(chat_target: Target):
    for options, match in (
        ({"num_steps": 0}, "at least 1"),
        ({"layers": 3}, "no option"),
        ({"d_vocab": 5}, "together"),
        ({"init": "zero"}, "Allowed: target, random"),
    ):
        with pytest.raises(UserError, match=match):
            build_trainee("mtp", chat_target, options)
    with pytest.raises(UserError, match="'gemma' cannot be trained"):
        build_trainee("mtp", wrap_target(tiny_model("gemma")), {})
