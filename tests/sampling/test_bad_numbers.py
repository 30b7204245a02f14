"""NaN, infinities, nothing left, a q that is none: reported with row and position, only where it matters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from toy_decoder import table_model, toy_decode

from selfspec.errors import UserError
from selfspec.sampling import NoiseKey, Sampling, build_rule, build_transforms, faults, raise_for

V, K = 8, 3
RULES = ["greedy", "rejection", "coupled", "block", "typical"]


def rule_of(name: str):
    return build_rule(name, Sampling(temperature=0.0 if name == "greedy" else 1.0))


def accepted_drafts(name: str, rows: int = 4) -> tuple[Tensor, Tensor | None, Tensor, NoiseKey]:
    """Drafts drawn from the target itself, so that rules accept them all; positions start at 10."""
    rule, logits_BTV = rule_of(name), 3 * torch.randn(rows, K + 1, V, generator=torch.Generator().manual_seed(0))
    requests, positions = torch.arange(rows), torch.full((rows,), 10)
    drafts = [rule.draw(logits_BTV[:, k], NoiseKey(0, requests, positions, k)) for k in range(K)]
    drafted_BK = torch.stack([token for token, _ in drafts], dim=1)
    q_BKV = torch.stack([q for _, q in drafts], dim=1) if rule.needs_q else None
    return drafted_BK, q_BKV, logits_BTV, NoiseKey(0, requests, positions)


BAD_ROWS = {
    "NaN": (torch.nan, "one", faults.NAN_LOGITS),
    "+inf": (torch.inf, "one", faults.INFINITE_LOGITS),
    "removed": (-torch.inf, "all", faults.NOTHING_LEFT),
}


@pytest.mark.parametrize("where", range(K + 1))
@pytest.mark.parametrize("kind", BAD_ROWS)
@pytest.mark.parametrize("name", RULES)
def test_bad_logits_stop_acceptance_and_are_reported_there(name: str, kind: str, where: int) -> None:
    drafted_BK, q_BKV, logits_BTV, key = accepted_drafts(name)
    value, extent, code = BAD_ROWS[kind]
    logits_BTV[2, where, slice(None) if extent == "all" else 5] = value
    verdict = rule_of(name).accept(drafted_BK, q_BKV, torch.full((4,), K), logits_BTV, key)
    reached = int(verdict.num_accepted_B[2])
    assert reached <= where
    assert verdict.error_B.tolist() == [0, 0, code + 8 * where if reached == where else 0, 0]
    if name != "typical":
        assert reached == where, "drafts from the target itself are accepted up to the bad row"
        with pytest.raises(UserError, match=f"row 2, position {10 + where}"):
            raise_for(int(verdict.error_B[2]), row=2, position=10)


@pytest.mark.parametrize("name", RULES)
def test_bad_logits_behind_a_rejected_draft_or_in_padding_do_not_matter(name: str) -> None:
    drafted_BK, q_BKV, logits_BTV, key = accepted_drafts(name)
    logits_BTV[:, 2:] = torch.nan
    logits_BTV[:, 0].scatter_(1, drafted_BK[:, :1], -torch.inf)  # the first draft is impossible for the target
    verdict = rule_of(name).accept(drafted_BK, q_BKV, torch.full((4,), K), logits_BTV, key)
    assert verdict.num_accepted_B.tolist() == [0] * 4
    assert verdict.error_B.tolist() == [0] * 4
    padded = rule_of(name).accept(drafted_BK, q_BKV, torch.ones(4, dtype=torch.int64), logits_BTV, key)
    assert padded.error_B.tolist() == [0] * 4


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_a_q_that_is_not_a_distribution_is_reported(name: str) -> None:
    drafted_BK, q_BKV, logits_BTV, key = accepted_drafts(name)
    assert q_BKV is not None
    q_BKV[0, 1] *= 1.1
    q_BKV[1, 0] = torch.nan
    q_BKV[2, 2].scatter_(0, drafted_BK[2, 2:], 0.0)
    q_BKV[2, 2] /= q_BKV[2, 2].sum()
    q_BKV[3, 1, drafted_BK[3, 1] - 1] -= 0.5
    verdict = rule_of(name).accept(drafted_BK, q_BKV, torch.full((4,), K), logits_BTV, key)
    bad, impossible = faults.BAD_DRAFT_DISTRIBUTION, faults.IMPOSSIBLE_DRAFT
    assert verdict.error_B.tolist() == [bad + 8, bad, impossible + 16, bad + 8]
    with pytest.raises(UserError, match=r"row 0, position 11: .* does not sum to 1"):
        raise_for(int(verdict.error_B[0]), row=0, position=10)


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_a_q_in_half_precision_is_refused(name: str) -> None:
    drafted_BK, q_BKV, logits_BTV, key = accepted_drafts(name)
    assert q_BKV is not None
    with pytest.raises(UserError, match="bfloat16.*biased"):
        rule_of(name).accept(drafted_BK, q_BKV.bfloat16(), torch.full((4,), K), logits_BTV, key)
    rounded = rule_of(name).accept(drafted_BK, q_BKV.bfloat16().float(), torch.full((4,), K), logits_BTV, key)
    assert rounded.error_B.ne(0).all(), "rounding shows in the sum"


@pytest.mark.parametrize("name", RULES)
def test_shapes_that_do_not_fit_are_refused(name: str) -> None:
    drafted_BK, q_BKV, logits_BTV, key = accepted_drafts(name)
    with pytest.raises(UserError, match=r"3 drafts in 4 rows need logits \[4, 4, V\], got \[4, 3, 8\]"):
        rule_of(name).accept(drafted_BK, q_BKV, torch.full((4,), K), logits_BTV[:, :K], key)
    if q_BKV is not None:
        with pytest.raises(UserError, match="need q"):
            rule_of(name).accept(drafted_BK, q_BKV[..., :-1], torch.full((4,), K), logits_BTV, key)


def test_no_error_raises_nothing_and_every_kind_has_a_message() -> None:
    raise_for(0, row=0, position=0)
    for kind in range(1, len(faults.MESSAGES) + 1):
        with pytest.raises(UserError, match=r"row 3, position 27: "):
            raise_for(kind + 8 * 2, row=3, position=25)


@pytest.mark.parametrize("name", RULES)
def test_suppressing_every_token_is_an_error_not_a_token(name: str) -> None:
    sampling = Sampling(temperature=0.0 if name == "greedy" else 1.0, suppress_tokens=tuple(range(V)))
    with pytest.raises(UserError, match=r"row 0, position 2: every token has been removed"):
        toy_decode(
            table_model(V, 1), None, build_transforms(sampling), build_rule(name, sampling), prompt=[1, 2],
            num_drafts=0, max_new_tokens=3, requests=torch.tensor([0]),
        )  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_one_possible_token_is_always_the_token(name: str) -> None:
    """top_k = 1, and a vocabulary of one."""
    logits = torch.randn(50, 1, V)
    key, none = NoiseKey(0, torch.arange(50), torch.arange(50)), torch.zeros(50, 0, dtype=torch.int64)
    transforms = build_transforms(Sampling(temperature=0.0 if name == "greedy" else 1.0, top_k=1))
    verdict = rule_of(name).accept(none, None, torch.zeros(50, dtype=torch.int64), transforms(logits), key)
    assert torch.equal(verdict.next_token_B, logits[:, 0].argmax(-1))
    verdict = rule_of(name).accept(none, None, torch.zeros(50, dtype=torch.int64), logits[..., :1], key)
    assert verdict.next_token_B.eq(0).all()
    assert verdict.error_B.eq(0).all()
