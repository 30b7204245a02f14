"""Losses and label alignment, by gradient: what is supervised is what receives gradient, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.training.batches import Batches
from selfspec.training.data import Sample
from selfspec.training.losses import (
    LOSSES,
    acceptance,
    coarse_cross_entropy,
    head_loss_named,
    restrict,
)
from selfspec.training.teacher import distributions

VOCAB = 258


def draw(num: int = 300, width: int = 8, vocab: int = 40, kept: int = 5, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num, width, generator=generator, dtype=torch.float64)
    head = torch.randn(vocab, width, generator=generator, dtype=torch.float64)
    logp, ids = torch.log_softmax(2 * torch.randn(num, vocab, generator=generator, dtype=torch.float64), -1).topk(kept)
    weight = (torch.rand(num, generator=generator) < 0.8).double()
    return hidden, head, ids, logp, weight


def probabilities(hidden: Tensor, head: Tensor, ids: Tensor, logp: Tensor) -> tuple[Tensor, Tensor]:
    """(q, p) on the kept tokens and the rest, straight from the whole softmax."""
    q = torch.softmax(hidden @ head.T, -1)
    kept = torch.zeros_like(q, dtype=torch.bool).scatter_(1, ids, True)
    q_cells = torch.cat([q.gather(1, ids), q.masked_fill(kept, 0.0).sum(-1, keepdim=True)], -1)
    p = logp.exp()
    return q_cells, torch.cat([p, 1 - p.sum(-1, keepdim=True)], -1)


def plain_lk_hybrid(q: Tensor, p: Tensor) -> Tensor:
    alpha = torch.minimum(p, q).sum(-1)
    share = torch.exp(-3 * alpha).detach()
    return share * (p * (p / q).log()).sum(-1) + (1 - share) * 0.5 * (p - q).abs().sum(-1)


PLAIN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ce": lambda q, p: -(p * q.log()).sum(-1),
    "tv": lambda q, p: 0.5 * (p - q).abs().sum(-1),
    "nla": lambda q, p: -torch.minimum(p, q).sum(-1).log(),
    "lk_hybrid": plain_lk_hybrid,
}


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-9), (torch.float32, 2e-3)])
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_fused_head_loss_equals_the_plain_formula_in_value_and_gradient(name: str, dtype: torch.dtype, rtol: float):
    hidden, head, ids, logp, weight = (t.to(dtype) if t.is_floating_point() else t for t in draw())
    inputs = [[hidden.clone().requires_grad_(), head.clone().requires_grad_()] for _ in range(2)]
    fused = head_loss_named(name)(*inputs[0], ids, logp, weight)
    plain = (PLAIN[name](*probabilities(*inputs[1], ids, logp)) * weight).sum()
    torch.testing.assert_close(fused, plain, rtol=rtol, atol=0)
    for total in (fused, plain):
        (3 * total).backward()
    for ours, theirs in zip(*inputs, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=rtol, atol=rtol * float(theirs.grad.abs().max()))


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_loss_leads_to_the_target(name: str):
    """Descent on free logits brings α close to 1, from a draft that is far off."""
    _, _, ids, logp, _ = (t.float() if t.is_floating_point() else t for t in draw(num=20, width=40))
    logits = (2 * torch.randn(20, 40, generator=torch.Generator().manual_seed(1))).requires_grad_()
    before = acceptance(logits.detach(), ids, logp)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(300):
        optimizer.zero_grad()
        head_loss_named(name)(logits, torch.eye(40), ids, logp, torch.ones(20)).backward()
        optimizer.step()
    kept = logp.exp().sum(-1)
    assert float(before.mean()) < 0.4
    assert (acceptance(logits.detach(), ids, logp) > kept - 0.05).all()


def test_an_unknown_loss_names_those_there_are():
    with pytest.raises(UserError, match=r"train.loss='kl'.*ce, lk_hybrid, nla, tv"):
        head_loss_named("kl")


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_tokens_a_reduced_vocabulary_lacks_get_no_mass_and_no_gradient(name: str):
    hidden, head, ids, logp, weight = (t.float() if t.is_floating_point() else t for t in draw(vocab=40))
    place = torch.full((40,), -1)
    kept = torch.arange(0, 40, 2)  # the draft proposes even ids only
    place[kept] = torch.arange(20)
    places, restricted = restrict(ids, logp, place)
    inside = torch.where(ids % 2 == 0, logp.exp(), 0.0)
    expected = inside / (1 - torch.where(ids % 2 == 1, logp.exp(), 0.0).sum(-1, keepdim=True))
    torch.testing.assert_close(restricted.exp(), expected)
    small = head[kept]
    fused, plain = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    head_loss_named(name)(fused, small, places, restricted, weight).backward()
    total = plain.new_zeros(())
    for row in range(len(plain)):  # each position with the tokens that it can propose, as if no other had been kept
        there = restricted[row] > -torch.inf
        cells = probabilities(
            plain[row : row + 1], small, places[row : row + 1, there], restricted[row : row + 1, there]
        )
        total = total + PLAIN[name](*cells)[0] * weight[row]
    total.backward()
    torch.testing.assert_close(fused.grad, plain.grad, rtol=1e-3, atol=1e-4)


def test_loss_is_least_where_the_draft_equals_the_target():
    _, _, ids, logp, _ = draw(num=4)
    target_logits = torch.full((4, 40), -3.0)
    target_logits.scatter_(1, ids, logp.float())
    exact = torch.log_softmax(target_logits, -1)
    logp_exact = exact.gather(1, ids)
    best = coarse_cross_entropy(exact, ids, logp_exact)
    for seed in range(5):
        other = exact + 0.3 * torch.randn(exact.shape, generator=torch.Generator().manual_seed(seed))
        assert (coarse_cross_entropy(other, ids, logp_exact) > best).all()
    kept_mass = logp_exact.exp().sum(-1)
    torch.testing.assert_close(acceptance(exact, ids, logp_exact), kept_mass)


def test_first_answer_position_receives_gradient_and_prompts_do_not(chat_target: Target):
    samples = [Sample(0, list(range(20, 40)), 12, 0.0, False), Sample(1, list(range(50, 65)), 6, 1.0, False)]
    batches = Batches(samples, distributions(chat_target, samples, 8), batch_rows=1, row_tokens=40, seed=0)
    batch = next(batches.once())
    logits = torch.zeros(40, VOCAB, requires_grad=True)
    loss = coarse_cross_entropy(logits[batch.flat_N], batch.teacher_ids_NK, batch.teacher_logp_NK)
    (loss * batch.weight_N).sum().backward()
    touched = (logits.grad.abs().sum(-1) > 0).nonzero()[:, 0].tolist()
    # sample 0 lies at 0..19: its last prompt position 11 predicts the first answer token, 18 the last one
    assert touched == [*range(11, 19), *range(20 + 5, 20 + 14)]
    num = int(batch.weight_N.sum())
    assert batch.labels_N[:num].tolist() == [*range(32, 40), *range(56, 65)]


def test_teacher_rows_are_what_the_target_predicts_at_those_positions(chat_target: Target):
    samples = [Sample(i, list(range(20 + i, 34 + 2 * i)), 5 + i, 0.0, False) for i in range(4)]
    teachers = distributions(chat_target, samples, 6)
    for sample, teacher in zip(samples, teachers, strict=True):
        with torch.no_grad():
            logits = chat_target.hf_model(torch.tensor([sample.token_ids])).logits[0, sample.prompt_len - 1 : -1]
        logp, ids = torch.log_softmax(logits.float(), -1).topk(6)
        assert teacher.ids_AK.tolist() == ids.tolist()
        torch.testing.assert_close(torch.from_numpy(teacher.logp_AK).float(), logp, rtol=2e-3, atol=2e-3)


def test_packing_changes_no_gradient(chat_target: Target):
    from selfspec.training.trainee import build_trainee

    options = dict(hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=1)
    samples = [Sample(i, list(range(10 + 7 * i, 30 + 9 * i)), 6, 0.0, False) for i in range(3)]
    teachers = distributions(chat_target, samples, 8)
    gradients = []
    for row_tokens, rows in ((128, 1), (32, 3)):  # all in one row; one row each
        trainee = build_trainee("independent", chat_target, options)
        batches = Batches(samples, teachers, batch_rows=rows, row_tokens=row_tokens, seed=0)
        trainee.loss(next(batches.once())).backward()
        gradients.append({name: p.grad for name, p in trainee.module.named_parameters()})
    for name in gradients[0]:
        torch.testing.assert_close(gradients[0][name], gradients[1][name], rtol=1e-4, atol=1e-6)
