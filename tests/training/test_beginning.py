"""Training that begins with a draft trained before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.training.beginning import begin_with
from selfspec.training.draft_vocab import write_draft_vocab
from selfspec.training.job import train_draft
from selfspec.training.trainee import build_trainee
from selfspec.training.trainer import TrainConfig

MADE: dict[str, dict[str, Any]] = {
    "eagle3": {"feature_layers": (0, 1, 2), "num_steps": 1},
    "exit_adapter": {"exit_layer": 1},
    "hydra": {},
    "independent": {"hidden_size": 32, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1},
}


@pytest.fixture
def vocabularies(chat_target: Target, tmp_path: Path) -> tuple[str, str]:
    """Two orders of the tokens: their first 100 have some in common."""
    paths = []
    for name, shift in (("a", 0), ("b", 40)):
        ids = np.asarray([257, *((np.arange(200) + shift) % 250)], dtype=np.int64)
        write_draft_vocab(tmp_path / name, ids, np.ones(258), chat_target.fingerprint)
        paths.append(str(tmp_path / name))
    return paths[0], paths[1]


def saved(target: Target, kind: str, options: dict[str, Any], folder: Path) -> Any:
    trainee = build_trainee(kind, target, options)
    with torch.no_grad():
        for parameter in trainee.module.parameters():
            parameter.copy_(torch.randn_like(parameter).bfloat16())
    folder.mkdir()
    trainee.save(folder)
    return trainee


@pytest.mark.parametrize("kind", MADE)
def test_rows_of_tokens_that_both_vocabularies_have_are_taken_over(
    kind: str, chat_target: Target, vocabularies: tuple[str, str], tmp_path: Path
):
    first, second = vocabularies
    before = saved(chat_target, kind, {**MADE[kind], "draft_vocab": first, "d_vocab": 100}, tmp_path / "first")
    options = {**MADE[kind], "draft_vocab": second, "d_vocab": 120}
    fresh = build_trainee(kind, chat_target, options).module.state_dict()
    trainee: Any = build_trainee(kind, chat_target, options)
    begin_with(trainee, kind, tmp_path / "first", chat_target)
    old_ids, new_ids = before.token_ids.tolist(), trainee.token_ids.tolist()
    old, new = before.module.state_dict(), trainee.module.state_dict()
    rows = [name for name in old if name.endswith(("lm_head.weight", "embed_tokens.weight"))]
    assert bool(rows) == (kind in ("eagle3", "independent"))
    for name in new:
        if name not in rows:
            assert torch.equal(new[name], old[name]), name
    for name in rows:
        shared = 0
        for place, token in enumerate(new_ids):
            known = token in old_ids
            shared += known
            expected = old[name][old_ids.index(token)] if known else fresh[name][place]
            assert torch.equal(new[name][place], expected), (name, token)
        assert 1 < shared < 100
        if kind == "independent":
            assert torch.equal(new[name][-1], old[name][-1])  # the row of all other tokens


def test_a_draft_of_another_make_is_refused(chat_target: Target, tmp_path: Path):
    saved(chat_target, "eagle3", MADE["eagle3"], tmp_path / "draft")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    del config["shape"]["norm_before_residual"]  # written before there was a choice
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    begin_with(build_trainee("eagle3", chat_target, MADE["eagle3"]), "eagle3", tmp_path / "draft", chat_target)
    for kind, options, message in (
        ("eagle3", {"feature_layers": (0, 0, 2)}, "feature_layers"),
        ("eagle3", {"feature_layers": (0, 1, 2), "intermediate_size": 24}, "intermediate_size"),
        ("hydra", {}, "kind"),
    ):
        with pytest.raises(UserError, match=message):
            begin_with(build_trainee(kind, chat_target, options), kind, tmp_path / "draft", chat_target)
    with pytest.raises(UserError, match="not a trained draft"):
        begin_with(build_trainee("eagle3", chat_target, MADE["eagle3"]), "eagle3", tmp_path / "no", chat_target)
    with pytest.raises(UserError, match="not a trained draft"):
        options = MADE["independent"]
        begin_with(build_trainee("independent", chat_target, options), "independent", tmp_path / "no", chat_target)


def test_a_run_goes_on_from_the_draft_and_its_card_says_so(
    chat_target: Target, data_folder: Callable[..., Path], tmp_path: Path
):
    data = data_folder()
    common = {"warmup_steps": 0, "batch_rows": 2, "row_tokens": 64, "num_kept": 4, "autocast": False}
    first = TrainConfig(steps=3, learning_rate=1e-3, **common)  # type: ignore[arg-type]
    train_draft(chat_target, "hydra", {}, first, data, tmp_path / "first")
    still = TrainConfig(steps=1, learning_rate=1e-12, begin_with=str(tmp_path / "first"), **common)  # type: ignore[arg-type]
    train_draft(chat_target, "hydra", {}, still, data, tmp_path / "second", "the command")
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("first", "second")]
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=0, atol=1e-6)
    facts = (tmp_path / "second" / "training.json").read_text()
    assert '"begun_with"' in facts and '"begun_with"' not in (tmp_path / "first" / "training.json").read_text()
    assert "Begun with" in (tmp_path / "second" / "README.md").read_text()
