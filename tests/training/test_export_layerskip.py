"""A LayerSkip draft as a plain transformers model: its own generate exits early and writes the tokens ours writes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from export_drafts import fill
from transformers import AutoModelForCausalLM

import selfspec
import tiny_models
from selfspec.errors import UserError
from selfspec.target import Target, load_target, wrap_target
from selfspec.target.adapters import merge_adapter
from selfspec.target.byte_tokenizer import byte_tokenizer
from selfspec.training.export.jobs import export_draft
from selfspec.training.export.layerskip_out import OURS, check_exits
from selfspec.training.layerskip import build_layerskip

EXIT = 2
PROMPT = tiny_models.prompt_ids(7, vocab_size=250)


@pytest.fixture
def base() -> Target:
    return wrap_target(tiny_models.tiny_llama(vocab_size=258), byte_tokenizer(), "base")


def layerskip_draft(base: Target, folder: Path, lora: bool) -> None:
    """As train.py saves one, with weights that differ from the base's everywhere they may."""
    trainee = build_layerskip(base, {"exit_layer": EXIT, "lora_rank": 2 if lora else None})
    if lora:
        fill(trainee.module)
    else:
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in trainee.module.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    folder.mkdir()
    trainee.save(folder)


def trained_target(base: Target, folder: Path, lora: bool) -> Target:
    """The draft's own target as selfspec loads it, without the export."""
    if not lora:
        return load_target(folder, dtype="float32", device="cpu")
    merged = copy.deepcopy(base.hf_model)
    merge_adapter(merged, folder)
    return wrap_target(merged, None, "merged")


@pytest.mark.parametrize("lora", [True, False], ids=["adapter", "whole"])
def test_transformers_exits_early_and_writes_what_we_write(base: Target, tmp_path: Path, lora: bool):
    layerskip_draft(base, tmp_path / "draft", lora)
    export_draft(base, str(tmp_path / "draft"), "transformers", str(tmp_path / "out"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "llama" and not set(OURS) & set(config)
    assert f"assistant_early_exit={EXIT}" in (tmp_path / "out" / "README.md").read_text()

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    calls = [0] * 4
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, index=index: calls.__setitem__(index, calls[index] + 1))
    settings: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": None}
    theirs = model.generate(torch.tensor([PROMPT]), assistant_early_exit=EXIT, **settings)[0, len(PROMPT) :].tolist()
    assert calls[0] == calls[EXIT - 1] > calls[EXIT] == calls[3] > 0

    target = trained_target(base, tmp_path / "draft", lora)
    drafter = selfspec.load_drafter(tmp_path / "draft", target)
    outs = selfspec.decode(target, drafter, [PROMPT], max_new_tokens=14, lookahead=3, ignore_eos=True)
    assert outs[0].token_ids == theirs
    alone = selfspec.decode(base, None, [PROMPT], max_new_tokens=14, ignore_eos=True)
    assert alone[0].token_ids != theirs  # another model than its base


def test_a_target_that_was_merged_already_gives_the_same_export(base: Target, tmp_path: Path):
    layerskip_draft(base, tmp_path / "draft", lora=True)
    export_draft(base, str(tmp_path / "draft"), "transformers", str(tmp_path / "out"))
    merged = trained_target(base, tmp_path / "draft", lora=True)
    export_draft(merged, str(tmp_path / "draft"), "transformers", str(tmp_path / "again"))
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("out", "again"))
    assert set(one) == set(two) and all(torch.equal(one[name], two[name]) for name in one)


def test_what_is_not_that_draft_is_refused(base: Target, tmp_path: Path):
    layerskip_draft(base, tmp_path / "draft", lora=True)
    draft, out = str(tmp_path / "draft"), str(tmp_path / "out")
    other = wrap_target(tiny_models.tiny_llama(vocab_size=258, seed=1), None, "other")
    with pytest.raises(UserError, match="was trained from base"):
        export_draft(other, draft, "transformers", out)
    with pytest.raises(UserError, match="leave verifier out"):
        export_draft(base, draft, "transformers", out, "some/verifier")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    config["target"]["fingerprint"] = "0" * 16
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="one of the two was replaced"):
        export_draft(base, draft, "transformers", out)
    (tmp_path / "draft" / "config.json").write_text(json.dumps({"kind": "eagle3"}))
    with pytest.raises(UserError, match="format=transformers is for layerskip"):
        export_draft(base, draft, "transformers", out)
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_a_model_that_would_draft_with_all_its_layers_is_refused(base: Target, monkeypatch: pytest.MonkeyPatch):
    model = copy.deepcopy(base.hf_model)
    check_exits(model, model.model.layers, EXIT)
    assert model.config.num_hidden_layers == 4
    deaf = copy.deepcopy(model.config)
    monkeypatch.setattr(model.model, "config", deaf)  # what the forward pass looks at is not what generate lowers
    with pytest.raises(UserError, match="asked for 2 layers, it ran 4"):
        check_exits(model, model.model.layers, EXIT)
    assert model.config.num_hidden_layers == 4
