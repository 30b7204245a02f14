"""A reduced draft vocabulary: smaller support, the same output, EOS always in it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from selfspec import Sampling, UserError, build_drafter, decode, wrap_target
from selfspec.drafters.draft_vocab import draft_token_ids
from tiny_models import EOS_TOKEN_ID, prompt_ids, tiny_llama

TARGET = wrap_target(tiny_llama(), name="tiny")


@pytest.mark.parametrize("d_vocab", [1, 10, 96, 97])
def test_tokens_stay_the_targets_and_drafts_come_from_the_vocabulary_alone(d_vocab):
    drafter = build_drafter("early_exit", TARGET, exit_layer=3, d_vocab=d_vocab)
    allowed = set(draft_token_ids(TARGET, d_vocab).tolist())
    drafted = []
    for options in (dict(), dict(sampling=Sampling(temperature=1.0), acceptance="coupled")):
        expected = decode(TARGET, None, [prompt_ids(9)], max_new_tokens=30, ignore_eos=True, **options)[0]
        options |= dict(lookahead=3, on_round=lambda event: drafted.extend(event.drafted_ids))
        output = decode(TARGET, drafter, [prompt_ids(9)], max_new_tokens=30, ignore_eos=True, **options)[0]
        assert output.token_ids == expected.token_ids
    assert drafted and set(drafted) <= allowed


@torch.inference_mode()
def test_the_reduced_head_is_the_head_on_its_tokens():
    ids = draft_token_ids(TARGET, 10)
    hidden = torch.randn(1, 3, TARGET.width)
    full, reduced = TARGET.head(hidden), TARGET.reduced_unembed(ids)(TARGET.norm(hidden))
    assert torch.allclose(reduced[..., ids], full[..., ids], atol=1e-4)
    others = [token for token in range(TARGET.vocab_size) if token not in ids.tolist()]
    assert (reduced[..., others] == -torch.inf).all()


def test_ranked_ids_come_from_the_file_with_eos_in_front(tmp_path):
    path = tmp_path / "vocab.safetensors"
    save_file({"token_ids": torch.tensor([50, 7, 3])}, path)
    assert draft_token_ids(TARGET, 3, str(path)).tolist() == [EOS_TOKEN_ID, 50, 7]
    with pytest.raises(UserError, match="ranks 4 tokens, too few for d_vocab=9"):
        draft_token_ids(TARGET, 9, str(path))


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(d_vocab=0), r"d_vocab=0 .*allowed are 1 \(its EOS ids\) to 97"),
        (dict(d_vocab=98), "d_vocab=98"),
        (dict(draft_vocab="x.safetensors"), "needs d_vocab"),
        (dict(d_vocab=9, draft_vocab="missing.safetensors"), "cannot be read"),
    ],
)
def test_what_is_not_possible_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        build_drafter("early_exit", TARGET, exit_layer=2, **options)


def test_a_file_of_another_model_is_refused(tmp_path):
    path = tmp_path / "vocab.safetensors"
    save_file({"token_ids": torch.tensor([50, 700])}, path)
    with pytest.raises(UserError, match="outside the 97 of tiny"):
        draft_token_ids(TARGET, 3, str(path))
