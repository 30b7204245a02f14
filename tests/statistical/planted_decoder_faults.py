"""Faults that published decoders have had, each planted in this one by one change: the negative controls of the χ²
tests.

A fault is a function of pytest's monkeypatch. Wrong acceptance rules take the place of the right one; the others change
what the sampler hands to the transforms, the noise or the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from selfspec.decoding import decoder as decoder_module
from selfspec.decoding.sampler import Sampler
from selfspec.drafters.early_exit import EarlyExit
from selfspec.sampling import NoiseKey, Prefix, Rule, Verdict, uniforms
from selfspec.sampling.acceptance import block
from selfspec.sampling.acceptance.block import Block, accept_block
from selfspec.sampling.acceptance.rejection import Rejection, accept_rejection
from selfspec.sampling.acceptance.verdict import at
from selfspec.sampling.distribution import draw, probabilities
from selfspec.sampling.noise import STREAM_DRAFT

Patch = pytest.MonkeyPatch
STREAM_OF_FAULTS = 200  # noise that nothing else uses


def instead_of_the_rule(patch: Patch, rule: Rule) -> None:
    patch.setattr(decoder_module, "build_rule", lambda acceptance, sampling: rule)


def one_uniform(noise: NoiseKey) -> Tensor:
    return uniforms(noise.seed, noise.request_B, noise.position_B, STREAM_OF_FAULTS, 1)[:, 0]


@dataclass
class Wrong:
    """A right rule with one of its two functions replaced."""

    right: Rule
    draw_token: Callable | None = None
    judge: Callable | None = None
    name, lossy, needs_q = "wrong", False, True

    def draw(self, logits_BV: Tensor, noise: NoiseKey) -> tuple[Tensor, Tensor | None]:
        return (self.draw_token or self.right.draw)(logits_BV, noise)

    def accept(self, drafted_BK, q_BKV, num_drafted_B, logits_BTV, noise) -> Verdict:
        return (self.judge or self.right.accept)(drafted_BK, q_BKV, num_drafted_B, logits_BTV, noise)


def corrected_by(right: Rule, weights: Callable[[Tensor, Tensor], Tensor]) -> Wrong:
    """After a rejection the token is drawn in proportion to weights(p, q)."""

    def judge(drafted_BK, q_BKV, num_drafted_B, logits_BTV, noise):
        verdict = right.accept(drafted_BK, q_BKV, num_drafted_B, logits_BTV, noise)
        last_B = verdict.num_accepted_B.clamp(max=drafted_BK.shape[1] - 1)
        p_BV = at(probabilities(logits_BTV), verdict.num_accepted_B)
        if q_BKV is None:
            q_BV = torch.zeros_like(p_BV).scatter_(-1, at(drafted_BK, last_B)[:, None], 1.0)
        else:
            q_BV = at(q_BKV, last_B)
        token_B = draw(weights(p_BV, q_BV), one_uniform(noise))
        rejected_B = verdict.num_accepted_B < num_drafted_B
        return replace(verdict, next_token_B=torch.where(rejected_B, token_B, verdict.next_token_B))

    return Wrong(right, judge=judge)


def residual_not_subtracted(patch: Patch) -> None:
    """The correction is drawn from p."""
    instead_of_the_rule(patch, corrected_by(Rejection(), lambda p_BV, q_BV: p_BV))


def residual_by_softmax(patch: Patch) -> None:
    """max(p − q, 0) goes through a softmax (transformers 28508)."""
    instead_of_the_rule(patch, corrected_by(Rejection(), lambda p, q: (p - q).clamp_min(0).softmax(-1)))


def block_without_memory(patch: Patch) -> None:
    """Block verification in which a path's mass forgets the drafts before the last one: min(r_i, 1)."""

    def forgetful(p_x_BK, q_x_BK):
        return torch.nn.functional.pad((p_x_BK / q_x_BK).clamp_max(1), (1, 0), value=1.0)

    patch.setattr(block, "path_mass", forgetful)


def argmax_verified_as_sampled(patch: Patch) -> None:
    """The draft is q's argmax, tested as if it had been drawn from q (transformers 32867)."""

    def draw_token(logits_BV, noise):
        return logits_BV.argmax(-1), probabilities(logits_BV)

    instead_of_the_rule(patch, Wrong(Rejection(), draw_token=draw_token))


def draft_noise_tests_the_draft(patch: Patch) -> None:
    """The uniform that drew a draft also tests it."""

    def judge(drafted_BK, q_BKV, num_drafted_B, logits_BTV, noise):
        u_BK = uniforms(noise.seed, noise.request_B, noise.position_B, STREAM_DRAFT, drafted_BK.shape[1])
        return accept_rejection(drafted_BK, q_BKV, num_drafted_B, logits_BTV, u_BK, one_uniform(noise))

    instead_of_the_rule(patch, Wrong(Rejection(), judge=judge))


def draft_noise_tests_the_block(patch: Patch) -> None:
    def judge(drafted_BK, q_BKV, num_drafted_B, logits_BTV, noise):
        u_BK = uniforms(noise.seed, noise.request_B, noise.position_B, STREAM_DRAFT, drafted_BK.shape[1])
        return accept_block(drafted_BK, q_BKV, num_drafted_B, logits_BTV, u_BK, one_uniform(noise))

    instead_of_the_rule(patch, Wrong(Block(), judge=judge))


def noise_of_the_test_draws_the_correction(patch: Patch) -> None:
    """One uniform tests the first draft and draws the token that follows."""

    def judge(drafted_BK, q_BKV, num_drafted_B, logits_BTV, noise):
        key = (noise.seed, noise.request_B, noise.position_B, STREAM_OF_FAULTS)
        u_BK = uniforms(*key, drafted_BK.shape[1])
        return accept_rejection(drafted_BK, q_BKV, num_drafted_B, logits_BTV, u_BK, u_BK[:, 0])

    instead_of_the_rule(patch, Wrong(Rejection(), judge=judge))


def certain_draft_always_stands(patch: Patch) -> None:
    """Prompt lookup's tokens are accepted as they are."""

    def judge(drafted_BK, q_BKV, num_drafted_B, logits_BTV, noise):
        p_BV = at(probabilities(logits_BTV), num_drafted_B)
        return Verdict(num_drafted_B, draw(p_BV, one_uniform(noise)), torch.zeros_like(num_drafted_B))

    instead_of_the_rule(patch, Wrong(Rejection(), judge=judge))


def q_before_transforms(patch: Patch) -> None:
    """Tokens come from the transformed logits, q from the raw ones (transformers 47932)."""
    draw_token = Sampler.draw

    def faulty(self, rows, step, logits_BV):
        return replace(draw_token(self, rows, step, logits_BV), q_BV=probabilities(logits_BV))

    patch.setattr(Sampler, "draw", faulty)


def bonus_from_raw_logits(patch: Patch) -> None:
    """After full acceptance the token is drawn from the untransformed logits."""
    transform, accept, raw = Sampler.transform, Sampler.accept, []

    def remember(self, rows, logits_BTV):
        raw[:] = [logits_BTV]
        return transform(self, rows, logits_BTV)

    def faulty(self, rows, draft, logits_BTV):
        verdict = accept(self, rows, draft, logits_BTV)
        bonus_B = draw(probabilities(raw[0][:, -1]), one_uniform(self._noise(rows, 0)))
        full_B = verdict.num_accepted_B == draft.tokens_BK.shape[1]
        return replace(verdict, next_token_B=torch.where(full_B, bonus_B, verdict.next_token_B))

    patch.setattr(Sampler, "transform", remember)
    patch.setattr(Sampler, "accept", faulty)


def _change_noise(patch: Patch, **zeroed: bool) -> None:
    noise = Sampler._noise

    def faulty(self, rows, step):
        key = noise(self, rows, step)
        return replace(key, **{name: torch.zeros_like(getattr(key, name)) for name in zeroed})

    patch.setattr(Sampler, "_noise", faulty)


def rounds_share_noise(patch: Patch) -> None:
    """Every round of a request starts over with the same noise."""
    _change_noise(patch, position_B=True)


def requests_share_noise(patch: Patch) -> None:
    """Every request of a call gets the same noise."""
    _change_noise(patch, request_B=True)


def _change_prefix(patch: Patch, ends: Callable) -> None:
    def faulty(self, rows, first, width):
        if not self.transforms.stateful:
            return None
        return Prefix(rows.tokens_BS, ends(rows, first, width).expand(-1, width) + 1, rows.prompt_lens_B)

    patch.setattr(Sampler, "_prefix", faulty)


def penalties_of_the_round_start(patch: Patch) -> None:
    """Stateful transforms see the round's first prefix at every position ("relaxed" penalties)."""
    _change_prefix(patch, lambda rows, first, width: rows.positions(0, 1))


def penalties_see_later_drafts(patch: Patch) -> None:
    """At verification, stateful transforms see the whole draft at every position."""
    _change_prefix(patch, lambda rows, first, width: rows.positions(first + width - 1, 1))


def acceptance_conditioned_on_the_stop(patch: Patch) -> None:
    """The draft ends before the first token that was unlikely under q: it withdraws what it has drawn."""
    propose = EarlyExit.propose

    def faulty(self, rows, drafting):
        draft = propose(self, rows, drafting)
        likely_BK = draft.q_BKV.gather(-1, draft.tokens_BK[..., None])[..., 0] > 0.4
        return replace(draft, num_drafted_B=likely_BK.long().cumprod(1).sum(1))

    patch.setattr(EarlyExit, "propose", faulty)
