"""EAGLE-3 drafts leave and come back tensor by tensor, and nothing that a format cannot say is written or read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from export_drafts import RANKED, eagle3_draft, edit, read, small_target

import tiny_models
from selfspec.errors import UserError
from selfspec.target import Target, wrap_target
from selfspec.target.byte_tokenizer import byte_tokenizer
from selfspec.training.export.jobs import export_draft, import_draft

HUB_ID = "some/verifier"
FORMATS = ("speculators", "midlayer")


@pytest.fixture(scope="module")
def target() -> Target:
    return small_target(head_dim=16)  # 4 heads of 16 in a width of 32


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("d_vocab", [len(RANKED), None, tiny_models.VOCAB_SIZE])
def test_what_is_exported_and_read_again_is_the_same_draft(
    target: Target, tmp_path: Path, format: str, d_vocab: int | None
):
    eagle3_draft(target, tmp_path / "draft", d_vocab)
    export_draft(target, str(tmp_path / "draft"), format, str(tmp_path / "out"), HUB_ID)
    import_draft(target, str(tmp_path / "out"), str(tmp_path / "back"))
    (before, old), (after, new) = read(tmp_path / "draft"), read(tmp_path / "back")
    ids = old.pop("token_ids") if d_vocab else torch.arange(target.vocab_size)
    order = ids.argsort()
    if d_vocab == len(RANKED):
        torch.testing.assert_close(new.pop("token_ids"), ids[order], rtol=0, atol=0)
    old["lm_head.weight"] = old["lm_head.weight"][order]  # draft ids ascend in both formats
    assert set(new) == set(old)
    for name, tensor in old.items():
        assert new[name].dtype == torch.bfloat16 and torch.equal(new[name], tensor), name
    assert after.pop("imported_from") == "out"
    if d_vocab == target.vocab_size:  # all of them: no reduced vocabulary
        before["d_vocab"] = None
    if format == "midlayer":  # cannot say how many steps were trained: EAGLE-3's own
        before["num_steps"] = 7
    assert after == {name: before[name] for name in after}


@pytest.mark.parametrize("format", FORMATS)
def test_draft_ids_are_offsets_to_target_ids_and_a_mask_that_agree_row_by_row(
    target: Target, tmp_path: Path, format: str
):
    trainee = eagle3_draft(target, tmp_path / "draft")
    export_draft(target, str(tmp_path / "draft"), format, str(tmp_path / "out"), HUB_ID)
    _, tensors = read(tmp_path / "out")
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    assert d2t.dtype == torch.int64 and t2d.dtype == torch.bool and t2d.shape == (target.vocab_size,)
    ids = torch.arange(len(RANKED)) + d2t
    assert ids.tolist() == sorted(RANKED) == t2d.nonzero().flatten().tolist()
    for row, token in enumerate(ids.tolist()):
        own = trainee.head.lm_head.weight[RANKED.index(token)].detach()
        assert torch.equal(tensors["lm_head.weight"][row].float(), own)


@pytest.mark.parametrize("format", FORMATS)
def test_a_head_behind_a_map_is_exported_as_the_own_head_that_it_is(target: Target, tmp_path: Path, format: str):
    trainee = eagle3_draft(target, tmp_path / "draft", own_head=False)
    export_draft(target, str(tmp_path / "draft"), format, str(tmp_path / "out"), HUB_ID)
    _, tensors = read(tmp_path / "out")
    product = target.head_weight_VM[sorted(RANKED)].detach() @ trainee.head.head_map.weight.detach()
    assert torch.equal(tensors["lm_head.weight"], product.bfloat16()) and "head_map.weight" not in tensors
    import_draft(target, str(tmp_path / "out"), str(tmp_path / "back"))
    _, back = read(tmp_path / "back")
    assert torch.equal(back["lm_head.weight"], product.bfloat16())


def test_every_flag_of_the_nested_configuration_is_written(target: Target, tmp_path: Path):
    eagle3_draft(target, tmp_path / "draft")
    export_draft(target, str(tmp_path / "draft"), "speculators", str(tmp_path / "out"), HUB_ID)
    config, tensors = read(tmp_path / "out")
    assert "model_type" not in config, "vLLM takes a folder with a model_type for something else"
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad")
    assert [config[flag] for flag in (*flags, "tie_word_embeddings")] == [False] * 6
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5] and config["draft_vocab_size"] == len(RANKED)
    verifier = config["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": HUB_ID, "architectures": ["LlamaForCausalLM"]}
    layer = config["transformer_layer_config"]
    assert (layer["vocab_size"], layer["head_dim"], layer["num_hidden_layers"]) == (target.vocab_size, 16, 1)
    assert layer["attention_bias"] is layer["mlp_bias"] is False
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (4 * 16, 2 * target.width)
    assert not any(name.startswith("midlayer.") for name in tensors)
    embedding = target.hf_model.get_input_embeddings().weight
    assert torch.equal(tensors["embed_tokens.weight"], embedding.bfloat16())


def test_the_flat_layout_counts_layers_as_each_of_its_readers_does(target: Target, tmp_path: Path):
    eagle3_draft(target, tmp_path / "draft", None)
    export_draft(target, str(tmp_path / "draft"), "midlayer", str(tmp_path / "out"), HUB_ID)
    config, tensors = read(tmp_path / "out")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]  # entering
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]  # leaving
    assert "d2t" not in tensors and "t2d" not in tensors and config["draft_vocab_size"] == target.vocab_size
    assert "embed_tokens.weight" not in tensors  # serving has the target's
    assert "midlayer.hidden_norm.weight" in tensors and not any(name.startswith("layers.") for name in tensors)


def test_biases_of_the_target_do_not_leak_into_the_draft(tmp_path: Path):
    biased = small_target("qwen2")
    eagle3_draft(biased, tmp_path / "draft")
    export_draft(biased, str(tmp_path / "draft"), "speculators", str(tmp_path / "out"), HUB_ID)
    config, tensors = read(tmp_path / "out")
    assert config["transformer_layer_config"]["attention_bias"] is False
    assert not any(name.endswith("bias") for name in tensors)
    assert config["speculators_config"]["verifier"]["architectures"] == ["Qwen2ForCausalLM"]


@pytest.mark.parametrize(
    ("layers", "format", "match"),
    [
        ((3, 1, 5), "speculators", "sorts the list"),
        ((1, 3, 3), "midlayer", "drops doubles"),
        ((1, 3, 6), "speculators", "before or after the norm"),
        ((0, 3, 5), "midlayer", "Allowed in this format: 1 to 5"),
    ],
)
def test_feature_layers_that_would_be_permuted_or_misread_are_refused(
    target: Target, tmp_path: Path, layers: tuple[int, ...], format: str, match: str
):
    eagle3_draft(target, tmp_path / "draft", feature_layers=layers)
    with pytest.raises(UserError, match=match):
        export_draft(target, str(tmp_path / "draft"), format, str(tmp_path / "out"), HUB_ID)
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_a_target_that_scales_its_embedding_is_refused(tmp_path: Path):
    gemma = small_target("gemma")
    eagle3_draft(gemma, tmp_path / "draft")
    with pytest.raises(UserError, match="scales its embeddings"):
        export_draft(gemma, str(tmp_path / "draft"), "speculators", str(tmp_path / "out"), HUB_ID)


def test_what_does_not_belong_together_is_refused_and_leaves_nothing_behind(target: Target, tmp_path: Path):
    draft, out = str(tmp_path / "draft"), str(tmp_path / "out")
    eagle3_draft(target, tmp_path / "draft")
    other = wrap_target(tiny_models.tiny_llama(num_layers=6, head_dim=16, seed=1), None, "other")
    with pytest.raises(UserError, match="fingerprint"):
        export_draft(other, draft, "speculators", out, HUB_ID)
    with pytest.raises(UserError, match="neither a hub id"):
        export_draft(target, draft, "speculators", out, "no-owner")
    with pytest.raises(UserError, match="give verifier=owner/name"):
        export_draft(target, draft, "midlayer", out)
    with pytest.raises(UserError, match="Did you mean 'midlayer'"):
        export_draft(target, draft, "midlayers", out, HUB_ID)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(UserError, match="exists already"):
        export_draft(target, draft, "midlayer", str(tmp_path / "taken"), HUB_ID)
    edit(tmp_path / "draft", lambda config, tensors: tensors.pop("fc.weight"))
    with pytest.raises(UserError, match=r"fc\.weight"):
        export_draft(target, draft, "speculators", out, HUB_ID)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "taken"]


def test_a_full_disk_leaves_no_folder(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    eagle3_draft(target, tmp_path / "draft")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("selfspec.training.export.folders.save_file", full)
    with pytest.raises(UserError, match="No space left"):
        export_draft(target, str(tmp_path / "draft"), "speculators", str(tmp_path / "out"), HUB_ID)
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


@pytest.mark.slow
def test_the_two_commands_as_typed(target: Target, tmp_path: Path):
    root = Path(__file__).parent.parent.parent
    target.hf_model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    eagle3_draft(target, tmp_path / "draft")

    def run(script: str, *overrides: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(root / "experiments" / script), "target=hf", f"target.path={tmp_path / 'model'}"]
        return subprocess.run([*command, *overrides], capture_output=True, text=True, cwd=root, timeout=300)

    to = [f"verifier={HUB_ID}", f"out={tmp_path / 'o'}"]
    done = run("export.py", f"draft={tmp_path / 'draft'}", "format=speculators", *to)
    assert done.returncode == 0 and "speculators" in done.stdout, done.stderr
    assert read(tmp_path / "o")[0]["draft_vocab_size"] == len(RANKED)
    done = run("import_draft.py", f"draft={tmp_path / 'draft'}", f"out={tmp_path / 'x'}")
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "none of the layouts" in done.stderr
    assert "Traceback" not in done.stderr
