"""A LoRA adapter merged at load is what peft computes; a wrong or damaged one is refused and changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

import selfspec
import tiny_models
from selfspec.errors import UserError
from selfspec.target import Target, load_target
from selfspec.target.adapters import merge_adapter, read_adapter

PROMPTS = [tiny_models.prompt_ids(7), tiny_models.prompt_ids(12, seed=1)]
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_adapter(model: Any, folder: Path, **settings: Any) -> Path:
    """Random factors, both of them, on every linear layer."""
    config = LoraConfig(**{"r": 3, "lora_alpha": 6, "target_modules": LINEARS, "task_type": "CAUSAL_LM"} | settings)
    adapted = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(folder)
    return folder


@pytest.fixture
def base_folder(tmp_path: Path) -> Path:
    tiny_models.tiny_llama().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def load(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Target:
    monkeypatch.setattr("selfspec.target.loading.load_tokenizer", lambda config: None)
    return load_target(folder, **{"dtype": "float32", "device": "cpu"} | options)


@pytest.mark.parametrize("fused", [False, None])
@pytest.mark.parametrize("settings", [{}, {"use_rslora": True, "rank_pattern": {r"model\.layers\.(0|2)\..*": 5}}])
def test_the_merged_target_decodes_as_transformers_with_peft_does(
    base_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], fused: bool | None
):
    adapter = write_adapter(tiny_models.tiny_llama(), tmp_path / "adapter", **settings)
    target = load(base_folder, monkeypatch, adapter=adapter, fused=fused)
    peft_model = PeftModel.from_pretrained(tiny_models.tiny_llama(), adapter).eval()
    plain = tiny_models.tiny_llama()
    drafter = selfspec.build_drafter("early_exit", target, exit_layer=2)
    ours = selfspec.decode(target, None, PROMPTS, max_new_tokens=24, ignore_eos=True)
    drafted = selfspec.decode(target, drafter, PROMPTS, max_new_tokens=24, ignore_eos=True, lookahead=3)
    for prompt, output, with_draft in zip(PROMPTS, ours, drafted, strict=True):
        options = dict(max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
        theirs = peft_model.generate(input_ids=torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
        assert output.token_ids == with_draft.token_ids == theirs
        assert plain.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() != theirs
    assert target.name == f"{base_folder}+adapter"


def test_the_weights_are_the_same_in_every_dtype_and_the_base_has_others(
    base_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    adapter = write_adapter(tiny_models.tiny_llama(), tmp_path / "adapter")
    names = {load(base_folder, monkeypatch, adapter=adapter, dtype=d).fingerprint for d in ("float32", "bfloat16")}
    assert len(names) == 1 and load(base_folder, monkeypatch).fingerprint not in names
    target = load(base_folder, monkeypatch, adapter=adapter, dtype="bfloat16", fused=False)
    merged = tiny_models.tiny_llama()
    merge_adapter(merged, adapter)
    for ours, exact in zip(target.hf_model.parameters(), merged.parameters(), strict=True):
        assert torch.equal(ours, exact.to(torch.bfloat16))  # rounded once, after the sum


def test_an_adapter_of_another_model_is_refused_and_the_model_stays_as_it_was(tmp_path: Path):
    adapter = write_adapter(tiny_models.tiny_llama(), tmp_path / "adapter")
    for other, match in (
        (tiny_models.tiny_llama(num_layers=2), "model.layers.2.* is not among its linear layers in this model"),
        (tiny_models.tiny_llama(hidden_size=64), "adapts .*down_proj as 32x64, but here it is 64x128"),
    ):
        before = [parameter.clone() for parameter in other.parameters()]
        with pytest.raises(UserError, match=match):
            merge_adapter(other, adapter)
        assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
    (adapter / "config.json").write_text(json.dumps({"base": {"name": "the right one", "fingerprint": "0" * 16}}))
    with pytest.raises(UserError, match="fingerprint 0000000000000000.*It was made for the right one"):
        merge_adapter(tiny_models.tiny_llama(), adapter)


@pytest.mark.parametrize(
    "settings, match",
    [
        ({"use_dora": True}, "not plain LoRA .*use_dora=True.*merge_and_unload"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern"),
        ({"bias": "all"}, "bias=all"),
    ],
)
def test_other_kinds_of_adapter_are_refused(tmp_path: Path, settings: dict[str, Any], match: str):
    with pytest.raises(UserError, match=match):
        read_adapter(write_adapter(tiny_models.tiny_llama(), tmp_path / "adapter", **settings))


def test_an_adapter_of_a_tied_head_is_refused(tmp_path: Path):
    adapter = write_adapter(tiny_models.tiny_llama(), tmp_path / "adapter", target_modules=["q_proj"])
    tensors = load_file(adapter / "adapter_model.safetensors")
    head = {f"base_model.model.lm_head.lora_{x}.weight": torch.ones(s) for x, s in (("A", (3, 32)), ("B", (97, 3)))}
    save_file(tensors | head, adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match="lm_head, which is tied to the embedding"):
        merge_adapter(tiny_models.tiny_llama(tied=True), adapter)
    merge_adapter(tiny_models.tiny_llama(), adapter)  # an untied one is a linear layer like any other


def test_damaged_missing_and_pickled_adapters_are_refused(
    base_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(UserError, match="No adapter folder .*nowhere"):
        load(base_folder, monkeypatch, adapter=tmp_path / "nowhere")
    adapter = write_adapter(tiny_models.tiny_llama(), tmp_path / "adapter")
    weights = adapter / "adapter_model.safetensors"
    whole, tensors = weights.read_bytes(), load_file(weights)
    first = sorted(tensors)[0]
    save_file({name: tensor for name, tensor in tensors.items() if name != first}, weights)
    with pytest.raises(UserError, match="incomplete"):
        read_adapter(adapter)
    save_file(tensors | {"base_model.model.lm_head.weight": torch.zeros(2, 2)}, weights)
    with pytest.raises(UserError, match="no LoRA factor"):
        read_adapter(adapter)
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="cannot be read"):
        read_adapter(adapter)
    weights.rename(adapter / "adapter_model.bin")
    with pytest.raises(UserError, match="has no adapter_model.safetensors.*Pickled"):
        read_adapter(adapter)
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(UserError, match="has no adapter_config.json"):
        read_adapter(adapter)


def test_transformers_early_exit_assistant_runs_on_the_merged_model(
    base_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The merged model is an ordinary one, so transformers' own self-speculation drafts with its layers, too."""
    adapter = write_adapter(tiny_models.tiny_llama(), tmp_path / "adapter")
    target = load(base_folder, monkeypatch, adapter=adapter)
    options = dict(max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
    ours = selfspec.decode(target, None, PROMPTS, max_new_tokens=16, ignore_eos=True)
    for prompt, output in zip(PROMPTS, ours, strict=True):
        ids = torch.tensor([prompt])
        theirs = target.hf_model.generate(ids, attention_mask=torch.ones_like(ids), assistant_early_exit=2, **options)
        assert theirs[0, len(prompt) :].tolist() == output.token_ids
