"""Label shifts, for every draft that can be trained: what is supervised, and that no label can be seen beforehand.

The published trap (a mask that is not shifted with the labels) leaves the first answer token without gradient, and says
nothing. Here every answer token's distribution must give gradient, and whatever predicts an answer token must depend on
the tokens before it and on none from it on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny_models
from selfspec.target import Target, wrap_target
from selfspec.training.batches import Batch, Batches, Teacher
from selfspec.training.data import Sample
from selfspec.training.features import hidden_states
from selfspec.training.losses import head_loss_named
from selfspec.training.trainee import Trainee, build_trainee, trainees

PROMPT, ANSWER = 7, 9
TEXT = list(range(30, 30 + PROMPT + ANSWER))
OPTIONS: dict[str, dict[str, Any]] = {
    "independent": dict(hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=1),
    "exit_adapter": dict(exit_layer=3),
}
# Medusa's heads leave out the token that the target itself has just added; Hydra's weights for it begin at 0
LOOKS_BACK = {"medusa": 2, "hydra": 2}
KINDS = sorted(trainees())


@pytest.fixture(scope="module")
def target(chat_target: Target) -> Target:
    model = tiny_models.tiny_llama(vocab_size=258, num_layers=6, max_positions=64)
    model.generation_config.eos_token_id = 257
    return wrap_target(model, chat_target.tokenizer, "tiny-six")


def batch_of(target: Target, trainee: Trainee, token_ids: list[int]) -> Batch:
    """One sample between two others; its answer token r is labelled with the made-up token r first of all."""
    texts = [list(range(100, 112)), token_ids, list(range(60, 75))]
    samples = [Sample(i, ids, PROMPT, 0.0, False) for i, ids in enumerate(texts)]
    teachers = [
        Teacher(
            np.stack([np.arange(s.answer_len) + 50 * i, *(np.full(s.answer_len, 200 + k) for k in range(3))], 1),
            np.log(np.tile([0.5, 0.2, 0.1, 0.1], (s.answer_len, 1))).astype(np.float16),
        )
        for i, s in enumerate(samples)
    ]
    features = hidden_states(target, samples, trainee.feature_layers) if trainee.feature_layers else None
    batches = Batches(samples, teachers, batch_rows=1, row_tokens=48, seed=0, features=features)
    return next(batches.once())


def predictions(target: Target, trainee: Trainee, token_ids: list[int]) -> list[dict[int, Tensor]]:
    """For each use of the objective (a step, a head): answer token of the middle sample -> the state predicting it."""
    seen: list[dict[int, Tensor]] = []

    def objective(hidden: Tensor, head: Tensor, ids: Tensor, logp: Tensor, weight: Tensor) -> Tensor:
        # backwards, so that of several heads judged together the first one's state stays
        rows = reversed(list(zip(ids[:, 0].tolist(), weight.tolist(), hidden.detach(), strict=True)))
        seen.append({label - 50: state for label, counts, state in rows if counts and 50 <= label < 100})
        return hidden.sum()

    trainee.loss(batch_of(target, trainee, token_ids), objective)
    return seen


def changed_at(place: int) -> list[int]:
    return [*TEXT[:place], 99, *TEXT[place + 1 :]]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def trainee(kind: str, target: Target) -> Trainee:
    return build_trainee(kind, target, OPTIONS.get(kind, {}))


def test_every_answer_token_gives_gradient_and_padding_gives_none(trainee: Trainee, target: Target):
    batch = batch_of(target, trainee, TEXT)
    logp = batch.teacher_logp_NK.float().requires_grad_()
    batch = Batch(**{**batch.__dict__, "teacher_logp_NK": logp})

    def objective(hidden: Tensor, head: Tensor, ids: Tensor, logp: Tensor, weight: Tensor) -> Tensor:
        logq = torch.log_softmax(hidden @ head.T, -1).gather(1, ids)
        return -(logp.exp() * logq).sum(-1) @ weight

    trainee.loss(batch, objective).backward()
    assert logp.grad is not None
    touched = logp.grad.abs().sum(-1) > 0
    num = int(batch.weight_N.sum())
    assert num == 5 + ANSWER + 8
    assert touched[:num].all() and not touched[num:].any()


def test_no_state_depends_on_the_token_it_predicts_or_a_later_one(trainee: Trainee, target: Target):
    whole = predictions(target, trainee, TEXT)
    assert set(whole[0]) == set(range(ANSWER))  # the first draft of a round: every answer token, none of the prompt
    for answer in (0, 4, ANSWER - 1):
        other = predictions(target, trainee, changed_at(PROMPT + answer))
        for states, others in zip(whole, other, strict=True):
            for row in range(answer + 1):
                if row in states:
                    torch.testing.assert_close(states[row], others[row], rtol=0, atol=1e-6)


def test_every_state_depends_on_the_newest_token_it_may_see(kind: str, trainee: Trainee, target: Target):
    whole = predictions(target, trainee, TEXT)
    back = LOOKS_BACK.get(kind, 1)
    for row in (0, 1, 5, ANSWER - 1):
        other = predictions(target, trainee, changed_at(PROMPT + row - back))
        assert (whole[0][row] - other[0][row]).abs().max() > 1e-5


@pytest.mark.parametrize("loss", ["tv", "nla", "lk_hybrid"])
def test_the_chosen_loss_is_what_is_trained_on(loss: str, trainee: Trainee, target: Target):
    batch = batch_of(target, trainee, TEXT)
    values: dict[str, Tensor] = {}
    for name in ("ce", loss):
        trainee.module.zero_grad()
        trainee.loss(batch, head_loss_named(name)).backward()
        gradients = [p.grad.flatten() for p in trainee.module.parameters() if p.grad is not None]
        values[name] = torch.cat(gradients)
    assert not torch.allclose(values["ce"], values[loss], rtol=1e-2)
