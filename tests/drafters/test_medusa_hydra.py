"""Medusa and Hydra in the decoder: their drafts are those of the heads at the true last position, and change no token.

The heads' output matrices are fitted to some of the target's own texts, so drafts are right, wrong, and right after
all, at every place of a round.
"""

from __future__ import annotations

import functools

import pytest
import torch
from head_drafts import plain_draft, random_heads, teach, write_heads

from selfspec import Decoder, Sampling, UserError, build_drafter, decode, load_drafter, wrap_target
from selfspec.cache import Paged
from selfspec.drafters.hydra import Hydra
from selfspec.drafters.medusa import Medusa
from tiny_models import prompt_ids, tiny_llama

pytestmark = pytest.mark.usefixtures("small_chunks")

KINDS = ("medusa", "hydra")
WITH_PREFIX = (("medusa", False), ("hydra", False), ("hydra", True))
DRAFTERS = {"medusa": Medusa, "hydra": Hydra}
TARGET = wrap_target(tiny_llama(), name="tiny")
PROMPTS = [prompt_ids(length, seed=length) for length in (1, 64, 65, 130, 2, 9)]
NEW_TOKENS = 24
OUTPUTS = ({}, {"own_head": True}, {"d_vocab": 30}, {"own_head": True, "d_vocab": 30})


@functools.cache
def answers(**options):
    return [output.token_ids for output in decode(TARGET, None, PROMPTS, max_new_tokens=NEW_TOKENS, ignore_eos=True)]


@functools.cache
def taught(kind, prefix=False, d_vocab=None):
    """Heads, draft vocabulary, drafter: fitted to four of the six answers."""
    heads, token_ids = random_heads(kind, TARGET, own_head=True, d_vocab=d_vocab, prefix=prefix)
    text = [prompt + answer for prompt, answer in zip(PROMPTS, answers(), strict=True)]
    teach(
        kind, heads, TARGET, [one[-NEW_TOKENS - 3 :] if len(one) < 40 else one[-NEW_TOKENS:] for one in text], token_ids
    )
    return heads, token_ids, DRAFTERS[kind](TARGET, heads, token_ids)


def counted(outputs):
    rounds = [record for output in outputs for record in output.rounds]
    return sum(r.num_accepted for r in rounds), sum(r.num_drafted for r in rounds)


@pytest.mark.parametrize(
    "rows, num_drafted, cache",
    [(1, 4, "contiguous"), (1, 1, Paged(4)), (3, 3, "contiguous"), (3, 4, Paged(4))],
    ids=str,
)
@pytest.mark.parametrize("kind, prefix", WITH_PREFIX)
def test_greedy_tokens_are_the_targets_whatever_stands_and_falls(kind, prefix, rows, num_drafted, cache):
    options = dict(max_new_tokens=NEW_TOKENS, ignore_eos=True, lookahead=num_drafted, max_batch_rows=rows, cache=cache)
    outputs = decode(TARGET, taught(kind, prefix)[2], PROMPTS, **options)
    assert [output.token_ids for output in outputs] == answers()
    accepted, drafted = counted(outputs)
    assert 0.1 < accepted / drafted < 0.9, "or this test would say little"


@pytest.mark.parametrize("rows, cache", [(1, "contiguous"), (3, Paged(4))], ids=str)
@pytest.mark.parametrize("kind, prefix", WITH_PREFIX)
def test_coupled_samples_are_the_autoregressive_ones(kind, prefix, rows, cache):
    options = dict(max_new_tokens=16, sampling=Sampling(temperature=0.8, top_p=0.95), acceptance="coupled", seed=5)
    options |= dict(max_batch_rows=rows, ignore_eos=True)
    expected = decode(TARGET, None, PROMPTS, **options)
    outputs = decode(TARGET, taught(kind, prefix)[2], PROMPTS, lookahead=3, cache=cache, **options)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert counted(outputs)[0] > 0


@pytest.mark.parametrize("rule", ["rejection", "block", "typical"])
@pytest.mark.parametrize("kind, prefix", WITH_PREFIX)
def test_sampled_tokens_depend_neither_on_the_cache_nor_on_the_other_rows(kind, prefix, rule):
    """That they follow p is tested by χ² (tests/statistical)."""
    options = dict(max_new_tokens=16, sampling=Sampling(temperature=0.8), acceptance=rule, seed=5, ignore_eos=True)
    found = [
        decode(TARGET, taught(kind, prefix)[2], PROMPTS, lookahead=3, max_batch_rows=rows, cache=cache, **options)
        for rows, cache in ((1, "contiguous"), (3, "contiguous"), (3, Paged(4)))
    ]
    tokens = [[output.token_ids for output in outputs] for outputs in found]
    assert tokens[0] == tokens[1] == tokens[2]
    assert all(output.lossy == (rule == "typical") for output in found[0])
    assert counted(found[0])[0] > 0


def watched_drafts(decoder, prompts, **options):
    """Per round of the call: the request's whole text, how much of it stood, and what was drafted behind it."""
    text, rounds = [list(prompt) for prompt in prompts], []

    def on_round(event):
        so_far = text[event.request.index]
        rounds.append((so_far, len(so_far), event.drafted_ids))
        so_far.extend(event.emitted_ids)

    decoder.decode(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True, on_round=on_round, lookahead=3, **options)
    return rounds


@pytest.mark.parametrize("outputs", OUTPUTS, ids=str)
@pytest.mark.parametrize("kind, prefix", WITH_PREFIX)
def test_every_draft_is_the_heads_own_behind_the_text_that_stands(kind, prefix, outputs):
    """Against heads run from scratch on transformers' hidden states, at every round: also right behind a rejection."""
    heads, token_ids = random_heads(kind, TARGET, prefix=prefix, num_blocks=3, **outputs)
    if "own_head" in outputs:
        heads, token_ids, _ = taught(kind, prefix, outputs.get("d_vocab"))
    decoder = Decoder(TARGET, DRAFTERS[kind](TARGET, heads, token_ids), max_batch_rows=2)
    rounds = watched_drafts(decoder, PROMPTS)
    assert min(length for _, length, _ in rounds) == 1
    for text, length, drafted in rounds:
        assert drafted == plain_draft(kind, heads, TARGET, text, length, len(drafted), token_ids)
    assert len({tuple(drafted) for _, _, drafted in rounds}) > len(rounds) / 3, "drafts depend on the text"


@pytest.mark.parametrize("cache", ["contiguous", Paged(4)], ids=["contiguous", "paged"])
@pytest.mark.parametrize("kind, prefix", WITH_PREFIX)
def test_a_prompt_that_goes_on_from_the_last_one_begins_with_the_state_of_its_own_end(kind, prefix, cache):
    heads, token_ids, drafter = taught(kind, prefix)
    decoder = Decoder(TARGET, drafter, cache=cache)
    text = watched_drafts(decoder, [PROMPTS[5]])[0][0]
    for longer in ([*text, 7, 8, 9], text[:20], text[:1], prompt_ids(1, seed=3)):
        for whole, length, drafted in watched_drafts(decoder, [longer], reuse=True):
            assert drafted == plain_draft(kind, heads, TARGET, whole, length, len(drafted), token_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_more_drafts_than_heads_are_refused_and_fewer_are_made(kind):
    drafter = taught(kind)[2]
    with pytest.raises(UserError, match=f"drafter '{kind}' drafts at most 4 tokens; lookahead=5"):
        decode(TARGET, drafter, [PROMPTS[5]], max_new_tokens=4, lookahead=5)
    output = decode(TARGET, drafter, [PROMPTS[5]], max_new_tokens=9, lookahead=2, ignore_eos=True)[0]
    assert {record.num_drafted for record in output.rounds} == {2} and output.token_ids == answers()[5][:9]


@pytest.mark.parametrize("outputs", OUTPUTS, ids=str)
@pytest.mark.parametrize("kind, prefix", WITH_PREFIX)
def test_what_was_saved_is_what_drafts(kind, prefix, outputs, tmp_path):
    heads, token_ids = random_heads(kind, TARGET, prefix=prefix, num_heads=3, seed=4, **outputs)
    write_heads(tmp_path, kind, TARGET, heads, token_ids, {})
    drafter = load_drafter(tmp_path, TARGET)
    assert drafter.name == kind and drafter.max_drafted == 3
    for text, length, drafted in watched_drafts(Decoder(TARGET, drafter), [PROMPTS[5]]):
        assert drafted == plain_draft(kind, heads, TARGET, text, length, len(drafted), token_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_that_does_not_fit_is_refused(kind, tmp_path):
    heads, token_ids = random_heads(kind, TARGET, d_vocab=30)

    def refusal(**changed):
        write_heads(tmp_path, kind, TARGET, heads, token_ids, changed)
        with pytest.raises(UserError) as error:
            build_drafter(kind, TARGET, checkpoint=str(tmp_path))
        return str(error.value)

    assert "lacks blocks.4.0.bias" in refusal(num_heads=5)
    assert "holds blocks.3.0.bias, which this draft has no use for" in refusal(num_heads=3)
    assert "holds blocks.0.1.bias" in refusal(num_blocks=1)
    assert "lacks lm_head.0.weight (4 missing in all)" in refusal(own_head=True)
    assert "num_heads=0" in refusal(num_heads=0) and "num_blocks='2'" in refusal(num_blocks="2")
    assert "own_head=None" in refusal(own_head=None)
    assert "holds 30 token_ids" in refusal(d_vocab=31)
    other = KINDS[1 - KINDS.index(kind)]
    assert f"holds a draft of kind '{other}'" in refusal(kind=other)
    stranger = wrap_target(tiny_llama(seed=9), name="stranger")
    write_heads(tmp_path, kind, TARGET, heads, token_ids, {})
    with pytest.raises(UserError, match="trained for target 'tiny' with fingerprint"):
        load_drafter(tmp_path, stranger)
    narrow = random_heads(kind, wrap_target(tiny_llama(hidden_size=16, num_heads=2)), d_vocab=30)[0]
    write_heads(tmp_path, kind, TARGET, narrow, token_ids, {})
    with pytest.raises(UserError, match="has shape"):
        load_drafter(tmp_path, TARGET)


@torch.inference_mode()
def test_idle_rows_keep_their_state():
    from selfspec.decoding.rows import Rows
    from selfspec.drafters.base import Seen

    drafter = taught("medusa")[2]
    rows = Rows(TARGET, 3, 64)
    drafter.start(rows)
    rows.draft_state.hidden_BM.fill_(1.0)
    positions = torch.tensor([[4, 5, 6], [-1, -1, -1], [9, 10, 11]])
    features = torch.arange(9.0).view(3, 3, 1).expand(3, 3, TARGET.width)
    drafter.refresh(rows, Seen(slice(None), positions, positions, positions, torch.tensor([1, 2, 0]), 64, features))
    assert rows.draft_state.hidden_BM[:, 0].tolist() == [1.0, 1.0, 6.0]
