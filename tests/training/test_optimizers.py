"""Muon moves the matrices inside the network, AdamW all the rest; nothing is moved twice or not at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tiny_models
from selfspec.target import Target, wrap_target
from selfspec.training.optimizers import optimizers_for
from selfspec.training.trainee import build_trainee, trainees
from selfspec.training.trainer import TrainConfig

CONFIG = TrainConfig(optimizer="muon")
INDEPENDENT = dict(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1)


@pytest.fixture(scope="module")
def target(chat_target: Target) -> Target:
    return wrap_target(tiny_models.tiny_llama(vocab_size=258, num_layers=6), chat_target.tokenizer)


@pytest.mark.parametrize("kind", sorted(trainees()))
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_every_parameter_has_one_optimizer(kind: str, name: str, target: Target):
    options = {"exit_adapter": dict(exit_layer=3), "independent": INDEPENDENT}.get(kind, {})
    module = build_trainee(kind, target, options).module
    trained = {id(p): p_name for p_name, p in module.named_parameters() if p.requires_grad}
    moved = {}
    for optimizer in optimizers_for(module, replace(CONFIG, optimizer=name)):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                assert id(parameter) not in moved
                moved[id(parameter)] = type(optimizer).__name__
                assert group["weight_decay"] == (CONFIG.weight_decay if parameter.dim() > 1 else 0.0)
    assert set(moved) == set(trained)
    by_muon = {trained[key] for key, used in moved.items() if used == "Muon"}
    if name == "adamw":
        assert not by_muon
        return
    vocab_sized = {p_name for p_name, p in module.named_parameters() if p.requires_grad and 258 in p.shape}
    matrices = {p_name for p_name, p in module.named_parameters() if p.requires_grad and p.dim() == 2}
    assert by_muon == matrices - vocab_sized


def test_muon_moves_a_matrix_as_far_as_adamw_does():
    moved = {}
    for name in ("adamw", "muon"):
        linear = torch.nn.Linear(48, 96, bias=False)
        before = linear.weight.detach().clone()
        (optimizer,) = optimizers_for(linear, replace(CONFIG, optimizer=name, weight_decay=0.0, learning_rate=1e-3))
        gradient = torch.randn(96, 48, generator=torch.Generator().manual_seed(0))
        for _ in range(5):
            linear.weight.grad = gradient.clone()
            optimizer.step()
        moved[name] = float((linear.weight.detach() - before).square().mean().sqrt())
    assert 0.1 * moved["adamw"] < moved["muon"] < moved["adamw"]
