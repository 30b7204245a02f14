"""Rejection sampling: the edge cases by hand, every branch against the exact reference, the whole against chi2."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from toy_decoder import ALPHA, TRANSFORMS, V, chi2_pvalue, exact_probabilities, table_model, toy_decode

from selfspec.sampling import NoiseKey, Verdict, build_transforms
from selfspec.sampling.acceptance.rejection import Rejection, accept_rejection, accepted, residual
from selfspec.sampling.exact_device import distinct, replay_chain
from selfspec.sampling.exact_rules import play_rejection, play_rejection_certain
from selfspec.sampling.games import GAMES

TINY, ALMOST_ONE = 2.0**-53, 1 - 2.0**-53


def one_draft(p: list[float], q: list[float] | None, x: int, u: float, u_residual: float = 0.5) -> tuple[int, int]:
    """Accepted drafts and next token for one draft x; the bonus position has p as well."""
    logits = torch.tensor([[p, p]], dtype=torch.float64).log()
    q_BKV = None if q is None else torch.tensor([[q]], dtype=torch.float64)
    verdict = accept_rejection(
        torch.tensor([[x]]), q_BKV, torch.tensor([1]), logits,
        torch.tensor([[u]], dtype=torch.float64), torch.tensor([u_residual], dtype=torch.float64),
    )  # fmt: skip
    assert verdict.error_B.tolist() == [0]
    return int(verdict.num_accepted_B), int(verdict.next_token_B)


def test_the_comparison_is_strict_so_probability_zero_is_never_accepted() -> None:
    zero, third = torch.tensor(0.0), torch.tensor(1 / 3)
    assert not accepted(zero, third, torch.tensor(0.0, dtype=torch.float64))
    assert one_draft([0.0, 1.0], [1.0, 0.0], x=0, u=TINY) == (0, 1)


def test_draft_likelier_under_p_is_always_accepted() -> None:
    assert one_draft([0.6, 0.4], [0.5, 0.5], x=0, u=ALMOST_ONE)[0] == 1


def test_p_equal_to_q_accepts_even_at_the_largest_uniform() -> None:
    p = torch.randn(49152).softmax(-1)
    assert accepted(p, p, torch.tensor(ALMOST_ONE, dtype=torch.float64)).all()


def test_empty_residual_falls_back_to_p_and_never_to_token_zero() -> None:
    p = torch.tensor([[0.0, 0.0, 0.5, 0.5]])
    assert torch.equal(residual(p, p), p)
    assert torch.equal(residual(torch.zeros(1, 3), torch.ones(1, 3)), torch.zeros(1, 3))


def test_disjoint_supports_reject_and_draw_from_p() -> None:
    for u_residual, token in ((TINY, 1), (0.49, 1), (0.51, 2), (ALMOST_ONE, 2)):
        assert one_draft([0.0, 0.5, 0.5], [1.0, 0.0, 0.0], x=0, u=TINY, u_residual=u_residual) == (0, token)


def test_certain_draft_is_accepted_with_p_and_taken_out_of_p_when_rejected() -> None:
    p = [0.2, 0.5, 0.3]
    assert one_draft(p, None, x=1, u=0.4999)[0] == 1
    for u_residual, token in ((TINY, 0), (0.399, 0), (0.401, 2), (ALMOST_ONE, 2)):
        assert one_draft(p, None, x=1, u=0.5001, u_residual=u_residual) == (0, token)


def test_padding_may_hold_anything_and_is_never_accepted() -> None:
    logits = torch.zeros(3, 3, 4)
    q = torch.full((3, 2, 4), 0.25)
    q[0] = torch.nan
    q[1, 1] = torch.nan
    drafted = torch.tensor([[-7, 10**6], [0, -7], [0, 0]])
    low = torch.full((3, 2), TINY, dtype=torch.float64)
    verdict = accept_rejection(drafted, q, torch.tensor([0, 1, 2]), logits, low, low[:, 0])
    assert verdict.num_accepted_B.tolist() == [0, 1, 2]
    assert verdict.error_B.tolist() == [0, 0, 0]


def test_without_drafts_it_is_a_plain_draw_from_p() -> None:
    logits = torch.tensor([[[0.2, 0.5, 0.3]]]).log()
    empty = torch.zeros(1, 0)
    for u, token in ((0.19, 0), (0.21, 1), (0.69, 1), (0.71, 2)):
        for q in (None, torch.zeros(1, 0, 3)):
            verdict = accept_rejection(
                empty.long(), q, torch.tensor([0]), logits, empty, torch.tensor([u], dtype=torch.float64)
            )
            assert (int(verdict.num_accepted_B), int(verdict.next_token_B)) == (0, token)


def test_residual_draw_never_gives_a_token_without_residual_mass_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 49152, generator=generator) * 4
    p, q = logits.softmax(-1), (logits + 0.1 * torch.randn(8, 49152, generator=generator)).softmax(-1)
    drafted = (q - p).argmax(-1)
    for u in (TINY, 0.3, 0.7, ALMOST_ONE):
        verdict = accept_rejection(
            drafted[:, None], q[:, None], torch.ones(8, dtype=torch.int64), logits[:, None].expand(8, 2, -1),
            torch.full((8, 1), ALMOST_ONE, dtype=torch.float64), torch.full((8,), u, dtype=torch.float64),
        )  # fmt: skip
        assert verdict.num_accepted_B.eq(0).all()
        rows, tokens = torch.arange(8), verdict.next_token_B
        assert (p[rows, tokens] > q[rows, tokens]).all()


@pytest.mark.parametrize("play", [play_rejection, play_rejection_certain])
def test_device_code_replays_every_branch_of_the_exact_rule(play) -> None:
    for game in distinct(GAMES):
        assert replay_chain(play.__name__, game, play, accept_rejection).mismatches == []


def test_replay_notices_a_wrong_residual_and_a_bent_threshold() -> None:
    """Negative control of the replay."""

    def from_p(x: Tensor, q: Tensor | None, n: Tensor, logits: Tensor, u: Tensor, last: Tensor) -> Verdict:
        right = accept_rejection(x, q, n, logits, u, last)
        index = right.num_accepted_B[:, None, None].expand(-1, 1, logits.shape[-1])
        cumulative = logits.gather(1, index)[:, 0].softmax(-1).cumsum(-1)
        return Verdict(right.num_accepted_B, (cumulative < last[:, None]).sum(-1), right.error_B)

    def bent(x: Tensor, q: Tensor | None, n: Tensor, logits: Tensor, u: Tensor, last: Tensor) -> Verdict:
        return accept_rejection(x, q, n, logits, u * (1 + 1e-6), last)

    for wrong in (from_p, bent):
        assert replay_chain("control", GAMES[0], play_rejection, wrong).mismatches


K, NEW = 3, 3


@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_sequences_of_three_tokens_follow_the_target(name: str, certain: bool) -> None:
    """chi2 over all 125 outputs, 30,000 requests in one batch."""
    target, draft = table_model(V, seed=1), table_model(V, seed=2)
    transforms = build_transforms(TRANSFORMS[name])
    tokens = toy_decode(
        target, draft, transforms, Rejection(), prompt=[0, 3], num_drafts=K, max_new_tokens=NEW,
        requests=torch.arange(30_000), certain_drafts=certain,
    )  # fmt: skip
    assert chi2_pvalue(tokens, exact_probabilities(target, transforms, [0, 3], V, NEW)) > ALPHA


class CorrectionFromP(Rejection):
    """Negative control: after a rejection the token is drawn from p."""

    def accept(
        self, drafted_BK: Tensor, q_BKV: Tensor | None, num_drafted_B: Tensor, logits_BTV: Tensor, noise: NoiseKey
    ) -> Verdict:
        right = super().accept(drafted_BK, q_BKV, num_drafted_B, logits_BTV, noise)
        index = right.num_accepted_B[:, None, None].expand(-1, 1, V)
        p_BV = logits_BTV.gather(1, index)[:, 0].softmax(-1)
        drawn_B = torch.multinomial(p_BV, 1, generator=torch.Generator().manual_seed(0))[:, 0]
        return Verdict(right.num_accepted_B, drawn_B, right.error_B)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_chi2_notices_a_correction_token_from_p(name: str) -> None:
    target, draft = table_model(V, seed=1), table_model(V, seed=2)
    transforms = build_transforms(TRANSFORMS[name])
    tokens = toy_decode(
        target, draft, transforms, CorrectionFromP(), prompt=[0, 3], num_drafts=K, max_new_tokens=NEW,
        requests=torch.arange(30_000),
    )  # fmt: skip
    assert chi2_pvalue(tokens, exact_probabilities(target, transforms, [0, 3], V, NEW)) < ALPHA


def test_draft_length_that_varies_per_row_and_round_keeps_the_target() -> None:
    target, draft, transforms = table_model(V, seed=1), table_model(V, seed=2), build_transforms(TRANSFORMS["plain"])
    requests = torch.arange(30_000)
    tokens = toy_decode(
        target, draft, transforms, Rejection(), prompt=[0, 3], num_drafts=K, max_new_tokens=NEW, requests=requests,
        num_drafted_of=lambda lengths_B: (lengths_B + requests) % (K + 1),
    )  # fmt: skip
    assert chi2_pvalue(tokens, exact_probabilities(target, transforms, [0, 3], V, NEW)) > ALPHA


def test_a_drafter_with_nothing_left_costs_an_acceptance_and_nothing_else() -> None:
    rule, key = Rejection(), NoiseKey(0, torch.tensor([0]), torch.tensor([5]))
    token, q = rule.draw(torch.full((1, 4), -torch.inf), key)
    assert token.tolist() == [0]
    assert q is not None
    assert q.tolist() == [[1, 0, 0, 0]]
    logits = torch.tensor([[[-torch.inf, 0.0, 0.0, 0.0]] * 2])
    verdict = rule.accept(token[:, None], q[:, None], torch.tensor([1]), logits, key)
    assert verdict.num_accepted_B.tolist() == [0]
    assert int(verdict.next_token_B) in (1, 2, 3)
    assert verdict.error_B.tolist() == [0]
