"""The exit adapter: trained on features the target really has, and only what is its own is trained and saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.training.batches import Batches
from selfspec.training.data import Sample, load_dataset
from selfspec.training.draft_vocab import count_draft_vocab
from selfspec.training.features import features_for, hidden_states
from selfspec.training.job import train_draft
from selfspec.training.teacher import distributions
from selfspec.training.trainee import build_trainee
from selfspec.training.trainer import TrainConfig

CONFIG = TrainConfig(
    steps=40,
    batch_rows=2,
    row_tokens=48,
    learning_rate=3e-3,
    warmup_steps=4,
    autocast=False,
    num_kept=8,
    log_every=1,
    validate_every=20,
    checkpoint_every=20,
)
SAMPLES = [Sample(i, list(range(20 + i, 40 + 2 * i)), 6 + i, 0.0, False) for i in range(4)]


def test_features_are_the_states_that_enter_the_layers(chat_target: Target):
    found = hidden_states(chat_target, SAMPLES, [1, 2])
    for sample, features in zip(SAMPLES, found, strict=True):
        with torch.no_grad():
            states = chat_target.hf_model.model(torch.tensor([sample.token_ids]), output_hidden_states=True)
        torch.testing.assert_close(features[:, :32].float(), states.hidden_states[1][0], rtol=1e-2, atol=5e-2)
        ours = chat_target.hf_model.model.norm(features[:, 32:].float())
        torch.testing.assert_close(ours, states.last_hidden_state[0], rtol=2e-2, atol=5e-2)


def test_kept_features_are_those_of_their_samples(chat_target: Target, data_folder: Callable[..., Path], identity):
    data = data_folder()
    dataset = load_dataset(data)
    chosen = [*dataset.held_out, *dataset.train[::-1]]  # of both shards, in another order
    features = features_for(chat_target, dataset, identity, [2, 0], lambda _: None)(chosen)
    assert len(features) == len(chosen) == 16
    for sample, kept in zip(chosen, features, strict=True):
        alone = hidden_states(chat_target, [sample], [2, 0])[0]
        torch.testing.assert_close(kept, alone, rtol=2e-2, atol=1e-2)


def test_an_untrained_adapter_at_the_last_layer_is_the_target(chat_target: Target):
    """Exit before the last layer + the copy of that layer + norm + head = the model: α is all that was kept."""
    trainee = build_trainee("exit_adapter", chat_target, {"exit_layer": chat_target.num_layers - 1})
    teachers = distributions(chat_target, SAMPLES, 16)
    features = hidden_states(chat_target, SAMPLES, trainee.feature_layers)
    batches = Batches(SAMPLES, teachers, batch_rows=1, row_tokens=128, seed=0, features=features)
    summary = trainee.validate(batches.once(), {0, 1, 2, 3}).summary()
    kept = sum(float(torch.from_numpy(t.logp_AK).float().exp().sum()) for t in teachers) / summary["answer_tokens"]
    assert summary["alpha"] == pytest.approx(kept, abs=0.03)  # features are kept in bfloat16
    assert summary["greedy_agreement"] > 0.9


@pytest.mark.parametrize("feed_forward", [True, False])
def test_training_changes_the_adapter_alone_and_saves_it(
    chat_target: Target, data_folder: Callable[..., Path], tmp_path: Path, feed_forward: bool
):
    data = data_folder()
    count_draft_vocab(chat_target, data, tmp_path / "vocab.safetensors", num_kept=8)
    before = {name: p.clone() for name, p in chat_target.hf_model.named_parameters()}
    options = {"exit_layer": 1, "draft_vocab": str(tmp_path / "vocab.safetensors"), "d_vocab": 60}
    options |= {"feed_forward": feed_forward}
    train_draft(chat_target, "exit_adapter", options, CONFIG, data, tmp_path / "o", "c", lambda _: None)
    assert all(torch.equal(before[name], p) for name, p in chat_target.hf_model.named_parameters())
    log = [json.loads(line) for line in (tmp_path / "o" / "log.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in log if "loss" in record]
    assert sum(losses[-4:]) < 0.95 * sum(losses[:4])
    weights = load_file(tmp_path / "o" / "model.safetensors")
    assert weights["token_ids"].shape == (60,) and 257 in weights["token_ids"]
    names = {name for name, _ in chat_target.hf_model.model.layers[0].named_parameters()}
    if not feed_forward:
        names = {name for name in names if not name.startswith(("mlp.", "post_attention_layernorm."))}
    assert set(weights) == {f"layer.{name}" for name in names} | {"norm.weight", "token_ids"}
    config = json.loads((tmp_path / "o" / "config.json").read_text())
    assert (config["kind"], config["exit_layer"], config["d_vocab"]) == ("exit_adapter", 1, 60)


def test_impossible_options_are_user_errors(chat_target: Target):
    for options, match in (
        ({"exit_layer": 0}, "Allowed: 1 to 1"),
        ({"exit_layer": 2}, "Allowed: 1 to 1"),
        ({"exit": 1}, "no option"),
        ({"exit_layer": 1, "d_vocab": 5}, "together"),
    ):
        with pytest.raises(UserError, match=match):
            build_trainee("exit_adapter", chat_target, options)
