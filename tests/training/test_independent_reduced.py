"""An independent draft with fewer tokens than its target: what it reads, what it can draft, and what stays as it is."""

from __future__ import annotations

import pytest
import torch
from layer_drafts import random_trainee
from safetensors.torch import save_file

from selfspec import Sampling, UserError, decode, load_drafter, wrap_target
from selfspec.drafters.independent import VOCABULARY
from tiny_models import prompt_ids, tiny_llama

TARGET = wrap_target(tiny_llama())
SHAPE = dict(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2)
PROMPTS = [prompt_ids(length, seed=length) for length in (1, 9, 70)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reduced")
    random_trainee("independent", TARGET, folder, d_vocab=20, **SHAPE).save(folder)
    return folder


@pytest.mark.parametrize("max_batch_rows", [1, 3])
def test_it_drafts_only_its_own_tokens_and_changes_none_of_the_targets(folder, max_batch_rows):
    drafter, seen = load_drafter(folder, TARGET), set()
    sampled = dict(sampling=Sampling(temperature=0.9), acceptance="coupled", seed=3)
    for options in ({}, sampled):
        options = dict(max_new_tokens=24, ignore_eos=True, **options)
        expected = decode(TARGET, None, PROMPTS, **options)
        outputs = decode(
            TARGET,
            drafter,
            PROMPTS,
            lookahead=3,
            max_batch_rows=max_batch_rows,
            on_round=lambda event: seen.update(event.drafted_ids),
            **options,
        )
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert len(seen) > 1 and seen <= set(drafter._token_ids_N.tolist())


@torch.inference_mode()
def test_training_and_drafting_read_the_same_rows(folder):
    """The trainee's logits on a text are those of the loaded draft."""
    trainee = random_trainee("independent", TARGET, folder, d_vocab=20, **SHAPE)
    drafter, ids = load_drafter(folder, TARGET), torch.tensor([prompt_ids(12, seed=4)])
    states = trainee._model.model(input_ids=trainee._row_V[ids], use_cache=False).last_hidden_state
    expected = trainee._model.lm_head(states)[..., :-1]
    pass_ = drafter.model.make_cache(1, 12).open(torch.arange(12)[None], 12)
    logits = drafter._logits(drafter.model.run_layers(drafter._embed(ids), 0, 2, pass_))
    torch.testing.assert_close(logits[..., drafter._token_ids_N], expected, rtol=1e-3, atol=1e-3)
    assert torch.isinf(logits).sum() == 12 * (TARGET.vocab_size - 20)
    assert len({int(trainee._row_V[t]) for t in range(TARGET.vocab_size)}) == 21, "all other tokens share one row"


def test_a_vocabulary_of_another_target_or_another_length_is_refused(folder, tmp_path):
    with pytest.raises(UserError, match="was trained for the target with fingerprint"):
        load_drafter(folder, wrap_target(tiny_llama(seed=9)))
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    save_file({"token_ids": torch.arange(7)}, broken / VOCABULARY, metadata={"target": TARGET.fingerprint})
    with pytest.raises(UserError, match="has 21 rows, and draft_vocab.safetensors beside it names 7 tokens"):
        load_drafter(broken, TARGET)
