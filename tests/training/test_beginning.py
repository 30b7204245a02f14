"""Training that begins with a draft trained before."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.training.beginning import begin_with
from selfspec.training.draft_vocab import write_draft_vocab
from selfspec.training.job import train_draft
from selfspec.training.packed import reduced_head
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
        ("eagle3", {"feature_layers": (0, 1, 2), "intermediate_size": 4096}, "intermediate_size"),
        ("hydra", {}, "kind"),
    ):
        with pytest.raises(UserError, match=message):
            begin_with(build_trainee(kind, chat_target, options), kind, tmp_path / "draft", chat_target)
    with pytest.raises(UserError, match="not a trained draft"):
        begin_with(build_trainee("eagle3", chat_target, MADE["eagle3"]), "eagle3", tmp_path / "no", chat_target)
    with pytest.raises(UserError, match="not a trained draft"):
        options = MADE["independent"]
        begin_with(build_trainee("independent", chat_target, options), "independent", tmp_path / "no", chat_target)


def begun(kind: str, options: dict[str, Any], folder: Path, target: Target) -> dict[str, torch.Tensor]:
    trainee = build_trainee(kind, target, options)
    begin_with(trainee, kind, folder, target)
    weights: dict[str, torch.Tensor] = trainee.module.state_dict()
    return weights


def test_a_map_begins_as_the_larger_drafts_own_output_matrix(
    chat_target: Target, vocabularies: tuple[str, str], tmp_path: Path
):
    options = {**MADE["eagle3"], "draft_vocab": vocabularies[0], "d_vocab": 100}
    larger: Any = build_trainee("eagle3", chat_target, options)
    map_MM = torch.eye(chat_target.width) + 0.1 * torch.randn(chat_target.width, chat_target.width)
    head: Any = larger.module.get_submodule("lm_head")
    with torch.no_grad():  # a matrix that the target's is equal to, behind this map
        head.weight.copy_(head.weight @ map_MM)
    (tmp_path / "draft").mkdir()
    larger.save(tmp_path / "draft")
    smaller = begun("eagle3", {**options, "own_head": False}, tmp_path / "draft", chat_target)
    assert "lm_head.weight" not in smaller
    hidden_NM = torch.randn(50, chat_target.width)
    through_VM = reduced_head(chat_target, larger.token_ids)[0]
    logits_NV = hidden_NM @ smaller["head_map.weight"].T @ through_VM.T  # as the drafter multiplies
    torch.testing.assert_close(logits_NV, head(hidden_NM), rtol=0, atol=0.03)  # it was saved in bfloat16
    with pytest.raises(UserError, match="own_head"):  # there is no way back
        begun_with_map = build_trainee("eagle3", chat_target, {**options, "own_head": False})
        (tmp_path / "small").mkdir()
        begun_with_map.save(tmp_path / "small")
        begun("eagle3", options, tmp_path / "small", chat_target)


def test_the_neurons_that_add_most_are_kept_together(chat_target: Target, tmp_path: Path):
    larger: Any = saved(chat_target, "eagle3", {**MADE["eagle3"], "intermediate_size": 12}, tmp_path / "draft")
    weights = {name: tensor.clone() for name, tensor in larger.module.state_dict().items()}
    gate, up, down = (f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
    kept = torch.tensor([1, 4, 5, 7, 11])
    with torch.no_grad():
        mlp = larger.module.get_submodule("layers.0.mlp")
        others = torch.ones(12).index_fill(0, kept, 0).bool()
        mlp.gate_proj.weight[others] *= 0.125
        mlp.down_proj.weight[:, others] *= 0.125
    larger.save(tmp_path / "draft")
    smaller = begun("eagle3", {**MADE["eagle3"], "intermediate_size": 5}, tmp_path / "draft", chat_target)
    assert torch.equal(smaller[gate], weights[gate][kept])
    assert torch.equal(smaller[up], weights[up][kept])
    assert torch.equal(smaller[down], weights[down][:, kept])


def test_attention_alone_begins_with_the_whole_layers(chat_target: Target, tmp_path: Path):
    larger: Any = saved(chat_target, "exit_adapter", MADE["exit_adapter"], tmp_path / "draft")
    options = {**MADE["exit_adapter"], "feed_forward": False}
    smaller = begun("exit_adapter", options, tmp_path / "draft", chat_target)
    theirs = larger.module.state_dict()
    assert {name for name in theirs if name not in smaller} == {
        name for name in theirs if ".mlp." in name or "post_" in name
    }
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in smaller.items())


def damaged(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    copied = folder.with_name(f"{folder.name}-damaged")
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(folder, copied)
    save_file(weights, copied / "model.safetensors")
    return copied


def test_what_cannot_be_made_smaller_is_refused_in_one_line(chat_target: Target, tmp_path: Path):
    gate, up, head = "layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight", "lm_head.weight"
    saved(chat_target, "eagle3", {**MADE["eagle3"], "intermediate_size": 12}, tmp_path / "draft")
    for change, message in (
        (lambda w: w.update(extra=torch.ones(1)), "extra"),
        (lambda w: w.pop(gate), "gate_proj"),
        (lambda w: w.update({up: w[up][:9].clone()}), "shape"),
        (lambda w: w.update({head: w[head][:50].clone()}), "head_map|lm_head"),
        (lambda w: w[head].fill_(float("nan")), "not finite"),
    ):
        folder = damaged(tmp_path / "draft", change)
        with pytest.raises(UserError, match=message):
            begun("eagle3", {**MADE["eagle3"], "intermediate_size": 5, "own_head": False}, folder, chat_target)
    saved(chat_target, "medusa", {"own_head": True}, tmp_path / "medusa")
    with pytest.raises(UserError, match="lm_head"):  # heads trained for matrices of their own, which nothing maps to
        begun("medusa", {"own_head": False}, tmp_path / "medusa", chat_target)


def test_rows_of_own_heads_are_the_tokens_they_were(chat_target: Target, vocabularies: tuple[str, str], tmp_path: Path):
    first, second = ({"own_head": True, "draft_vocab": path, "d_vocab": 100} for path in vocabularies)
    before = saved(chat_target, "medusa", first, tmp_path / "draft")
    after: Any = build_trainee("medusa", chat_target, second)
    begin_with(after, "medusa", tmp_path / "draft", chat_target)
    places = {token: place for place, token in enumerate(before.token_ids.tolist())}
    name = next(name for name in before.module.state_dict() if name.startswith("lm_head."))
    old, new = before.module.state_dict()[name], after.module.state_dict()[name]
    known = [(place, token) for place, token in enumerate(after.token_ids.tolist()) if token in places]
    assert 1 < len(known) < 100
    assert all(torch.equal(new[place], old[places[token]]) for place, token in known)


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
