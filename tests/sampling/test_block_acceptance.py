"""Block verification: exact also where drafts differ in length, and never accepts less than rejection."""

from __future__ import annotations

import pytest
import torch
from toy_decoder import ALPHA, TRANSFORMS, V, chi2_pvalue, exact_probabilities, table_model, toy_decode

from selfspec.sampling import NoiseKey, build_transforms, faults
from selfspec.sampling.acceptance.block import Block, accept_block
from selfspec.sampling.acceptance.rejection import accept_rejection
from selfspec.sampling.exact import expected_emitted, output_distribution, target_distribution
from selfspec.sampling.exact_device import distinct, replay_chain
from selfspec.sampling.exact_rules import MemorylessRule, play_block, play_rejection
from selfspec.sampling.games import GAMES
from selfspec.sampling.noise import uniforms

RULE = MemorylessRule("block", play_block)


def test_device_code_replays_every_branch_of_the_exact_rule() -> None:
    for game in distinct(GAMES):
        assert replay_chain("block", game, play_block, accept_block).mismatches == []


def test_replay_tells_block_verification_from_plain_rejection() -> None:
    assert replay_chain("control", GAMES[0], play_block, accept_rejection).mismatches


def test_a_draft_side_stop_that_looks_at_path_and_next_q_keeps_the_target() -> None:
    game = next(game for game in GAMES if game.name == "draft-side stop")
    assert output_distribution(RULE, game) == target_distribution(game)


def test_never_emits_less_than_rejection_in_expectation_and_sometimes_more() -> None:
    gains = [expected_emitted(RULE, g) - expected_emitted(MemorylessRule("r", play_rejection), g) for g in GAMES]
    assert min(gains) >= 0
    assert max(gains) > 0.1


def test_one_draft_is_plain_rejection() -> None:
    n = 500
    generator = torch.Generator().manual_seed(0)
    logits, q = torch.randn(n, 2, 6, generator=generator), torch.randn(n, 1, 6, generator=generator).softmax(-1)
    drafted = torch.randint(0, 6, (n, 1), generator=generator)
    u = uniforms(0, torch.arange(n), torch.arange(n), 0, 2)
    block = accept_block(drafted, q, torch.ones(n, dtype=torch.int64), logits, u[:, :1], u[:, 1])
    plain = accept_rejection(drafted, q, torch.ones(n, dtype=torch.int64), logits, u[:, :1], u[:, 1])
    assert torch.equal(block.num_accepted_B, plain.num_accepted_B)
    assert torch.equal(block.next_token_B, plain.next_token_B)


@pytest.mark.parametrize("name", ["plain", "top_p", "penalties"])
def test_sequences_of_three_tokens_follow_the_target(name: str) -> None:
    """chi2 over all 125 outputs, 30,000 requests, draft lengths 0..3 by row and round; false-alarm rate 1e-6."""
    target, draft = table_model(V, seed=1), table_model(V, seed=2)
    transforms, requests = build_transforms(TRANSFORMS[name]), torch.arange(30_000)
    tokens = toy_decode(
        target, draft, transforms, Block(), prompt=[0, 3], num_drafts=3, max_new_tokens=3, requests=requests,
        num_drafted_of=lambda lengths_B: 3 - (lengths_B + requests) % 5 // 2,
    )  # fmt: skip
    assert chi2_pvalue(tokens, exact_probabilities(target, transforms, [0, 3], V, 3)) > ALPHA


def test_chi2_notices_a_draft_length_that_looked_at_the_drafts() -> None:
    """Negative control: K is cut behind the round, by what the last draft turned out to be."""

    class Withdraws(Block):
        def accept(self, drafted_BK, q_BKV, num_drafted_B, logits_BTV, noise):
            return super().accept(drafted_BK, q_BKV, torch.where(drafted_BK[:, 0] == 1, 0, 3), logits_BTV, noise)

    target, draft = table_model(V, seed=1), table_model(V, seed=2)
    transforms = build_transforms(TRANSFORMS["plain"])
    tokens = toy_decode(
        target, draft, transforms, Withdraws(), prompt=[0, 3], num_drafts=3, max_new_tokens=3,
        requests=torch.arange(30_000),
    )  # fmt: skip
    assert chi2_pvalue(tokens, exact_probabilities(target, transforms, [0, 3], V, 3)) < ALPHA


def test_a_bad_row_of_logits_ends_the_chain_there() -> None:
    """Drafts equal to the target are all accepted, up to the row of NaN, which is reported with its position."""
    n = 50
    logits = torch.randn(n, 4, V, generator=torch.Generator().manual_seed(0))
    key = NoiseKey(0, torch.arange(n), torch.arange(n))
    rule = Block()
    drafts = [rule.draw(logits[:, k], NoiseKey(0, torch.arange(n), torch.arange(n), k)) for k in range(3)]
    drafted, q = torch.stack([x for x, _ in drafts], 1), torch.stack([q for _, q in drafts], 1)
    assert rule.accept(drafted, q, torch.full((n,), 3), logits, key).num_accepted_B.eq(3).all()
    logits[:, 2] = torch.nan
    verdict = rule.accept(drafted, q, torch.full((n,), 3), logits, key)
    assert verdict.num_accepted_B.eq(2).all()
    assert verdict.error_B.eq(faults.NAN_LOGITS + 8 * 2).all()


def test_certain_drafts_and_no_drafts() -> None:
    logits = torch.tensor([[[0.2, 0.5, 0.3], [0.1, 0.1, 0.8]]], dtype=torch.float64).log()
    u = lambda *values: torch.tensor([values], dtype=torch.float64)  # noqa: E731
    verdict = accept_block(torch.tensor([[1]]), None, torch.tensor([1]), logits, u(0.49), u(0.5)[0])
    assert (int(verdict.num_accepted_B), int(verdict.next_token_B)) == (1, 2)
    verdict = accept_block(torch.tensor([[1]]), None, torch.tensor([1]), logits, u(0.51), u(0.41)[0])
    assert (int(verdict.num_accepted_B), int(verdict.next_token_B)) == (0, 2)
    none = torch.zeros(1, 0)
    verdict = accept_block(none.long(), None, torch.tensor([0]), logits[:, :1], none.double(), u(0.21)[0])
    assert (int(verdict.num_accepted_B), int(verdict.next_token_B)) == (0, 1)
