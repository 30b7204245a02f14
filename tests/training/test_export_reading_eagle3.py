"""Published EAGLE-3 folders as others write them: what is read, and every difference that would draft badly refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from export_drafts import RANKED, edit, read, small_target
from safetensors.torch import save_file
from torch import Tensor

from selfspec.drafters.eagle3 import parts_of
from selfspec.drafters.eagle3_head import Eagle3Head, HeadShape
from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.training.eagle3 import UnrolledHead
from selfspec.training.export.jobs import import_draft

WIDTH, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 32, 4, 2, 16, 48, 97


@pytest.fixture(scope="module")
def target() -> Target:
    return small_target()  # its heads are of 8: the draft's own head size counts


def weights(layer: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "fc.weight": (WIDTH, 3 * WIDTH),
        f"{layer}self_attn.q_proj.weight": (HEADS * HEAD_DIM, 2 * WIDTH),
        f"{layer}self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, 2 * WIDTH),
        f"{layer}self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, 2 * WIDTH),
        f"{layer}self_attn.o_proj.weight": (WIDTH, HEADS * HEAD_DIM),
        f"{layer}mlp.gate_proj.weight": (MLP, WIDTH),
        f"{layer}mlp.up_proj.weight": (MLP, WIDTH),
        f"{layer}mlp.down_proj.weight": (WIDTH, MLP),
        f"{layer}input_layernorm.weight": (WIDTH,),
        f"{layer}hidden_norm.weight": (WIDTH,),
        f"{layer}post_attention_layernorm.weight": (WIDTH,),
        "norm.weight": (WIDTH,),
        "lm_head.weight": (len(RANKED), WIDTH),
    }
    drawn = {name: torch.randn(shape, generator=generator).bfloat16().half() for name, shape in shapes.items()}
    ids = torch.tensor(sorted(RANKED))
    drawn["d2t"] = ids - torch.arange(len(ids))
    drawn["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return drawn


def flat(folder: Path) -> Path:
    """As EAGLE's own repository publishes: float16, a flat Llama configuration that says little."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": WIDTH,
        "head_dim": HEAD_DIM,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vocab_size": VOCAB,
        "draft_vocab_size": len(RANKED),
    }
    return published(folder, config, weights("midlayer."))


def nested(folder: Path) -> Path:
    """As `speculators` saves, transformers 5 spelling of the rotary embedding included."""
    layer = {
        "model_type": "llama",
        "hidden_size": WIDTH,
        "head_dim": HEAD_DIM,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "vocab_size": VOCAB,
    }
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "norm_before_residual": False,
        "draft_vocab_size": len(RANKED),
        "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [{"speculative_tokens": 5}]},
        "transformer_layer_config": layer,
    }
    return published(folder, config, weights("layers.0."))


def published(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


LAYOUTS = {"flat": (flat, "midlayer."), "nested": (nested, "layers.0.")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_layouts_are_read_tensor_by_tensor(target: Target, tmp_path: Path, layout: str):
    make, layer = LAYOUTS[layout]
    config = import_draft(target, str(make(tmp_path / "theirs")), str(tmp_path / "ours"))
    written, tensors = read(tmp_path / "ours")
    assert written == config
    theirs = {name.replace(layer, "layers.0."): tensor for name, tensor in weights(layer).items()}
    del theirs["t2d"]
    assert tensors.pop("token_ids").tolist() == sorted(RANKED) == (theirs.pop("d2t") + torch.arange(12)).tolist()
    assert set(tensors) == set(theirs)
    for name, tensor in theirs.items():
        assert tensors[name].dtype == torch.bfloat16 and torch.equal(tensors[name].half(), tensor), name
    assert config["shape"] == {
        "width": WIDTH,
        "intermediate_size": MLP,
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rope_theta": 500000.0,
        "norm_eps": 1e-5,
        "d_vocab": 12,
        "norm_before_residual": False,
    }
    assert config["feature_layers"] == (
        [2, 3, 3] if layout == "flat" else [2, 3, 4]
    )  # 2, L/2, L−3 where nothing is said
    assert config["num_steps"] == (7 if layout == "flat" else 5)
    assert config["target"]["fingerprint"] == target.fingerprint


@pytest.mark.parametrize(
    ("said", "read_as"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}, [1, 3, 5]),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}}, [1, 3, 5]),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]},
            },
            [1, 3, 5],
        ),
    ],
)
def test_layers_are_counted_entering_or_leaving_as_the_field_means_them(
    target: Target, tmp_path: Path, said: dict[str, Any], read_as: list[int]
):
    edit(flat(tmp_path / "theirs"), lambda config, _: config.update(said))
    config = import_draft(target, str(tmp_path / "theirs"), str(tmp_path / "ours"))
    assert config["feature_layers"] == read_as
    config = import_draft(target, str(tmp_path / "theirs"), str(tmp_path / "given"), [2, 4, 6])
    assert config["feature_layers"] == [2, 4, 6]


@torch.no_grad()
def test_a_normed_residual_is_read_and_drafted_with(target: Target, tmp_path: Path):
    hidden_1TM = torch.randn(1, 3, WIDTH)
    for normed in (True, False):
        edit(nested(tmp_path / f"theirs{normed}"), set_top(norm_before_residual=normed))
        config = import_draft(target, str(tmp_path / f"theirs{normed}"), str(tmp_path / f"ours{normed}"))
        head = Eagle3Head(HeadShape(**config["shape"]))
        head.load_state_dict({k: v.float() for k, v in read(tmp_path / f"ours{normed}")[1].items() if k != "token_ids"})
        expected = head.layer.hidden_norm(hidden_1TM) if normed else hidden_1TM
        drafted = parts_of(target, head, torch.tensor(sorted(RANKED))).join_token(torch.randn(1, 3, WIDTH), hidden_1TM)
        trained = UnrolledHead(head).enter(torch.randn(1, 3, WIDTH), hidden_1TM, torch.arange(3)[None])
        torch.testing.assert_close(drafted[1], expected)
        torch.testing.assert_close(trained[3], expected)


def set_layer(**changes: Any) -> Any:
    return lambda config, _: config.get("transformer_layer_config", config).update(changes)


def set_top(**changes: Any) -> Any:
    return lambda config, _: config.update(changes)


def set_tensor(name: str, tensor: Tensor) -> Any:
    return lambda _, tensors: tensors.update({name: tensor})


REFUSED = {
    "unsaid residual": ("nested", lambda c, _: c.pop("norm_before_residual"), "does not say norm_before_residual"),
    "norm before fc": ("flat", set_top(norm_before_fc=True), "norm_before_fc is true"),
    "normed levels": ("nested", set_top(fc_norm=True), "fc_norm is true"),
    "normed output": ("nested", set_top(norm_output=True), "norm_output is true"),
    "tied head": ("flat", set_top(tie_word_embeddings=True), "tie_word_embeddings is true"),
    "attention bias": ("nested", set_layer(attention_bias=True), "attention_bias is true"),
    "a stray bias": ("flat", set_tensor("midlayer.self_attn.q_proj.bias", torch.zeros(64)), "q_proj.bias .* no place"),
    "head norms": ("nested", set_layer(model_type="qwen3"), "model_type is 'qwen3'"),
    "two layers": ("nested", set_layer(num_hidden_layers=2), "num_hidden_layers is 2"),
    "another algorithm": ("nested", set_top(speculators_model_type="dflash"), "'dflash'; eagle3 is read"),
    "scaled rotary": ("flat", set_top(rope_scaling={"rope_type": "llama3", "factor": 8.0}), r"scaled \(llama3\)"),
    "old scaled rotary": ("flat", set_top(rope_scaling={"type": "linear", "factor": 2.0}), r"scaled \(linear\)"),
    "a window": ("nested", set_layer(layer_types=["sliding_attention"]), "slides"),
    "width": ("flat", set_top(hidden_size=64), "width is 64"),
    "target width": ("nested", set_top(target_hidden_size=64), "target_hidden_size 64"),
    "vocabulary": ("nested", set_layer(vocab_size=98), "vocabulary of 98 tokens"),
    "head rows": ("flat", set_top(draft_vocab_size=32000), "draft_vocab_size is 32000, lm_head.weight has 12"),
    "no map": ("flat", lambda _, t: t.pop("d2t"), "12 of 97 tokens, but d2t"),
    "ids, not offsets": ("flat", set_tensor("d2t", torch.tensor(sorted(RANKED))), "it holds offsets"),
    "the wrong mask": ("nested", set_tensor("t2d", torch.ones(VOCAB, dtype=torch.bool)), "d2t and t2d name different"),
    "a missing weight": ("nested", lambda _, t: t.pop("layers.0.hidden_norm.weight"), "hidden_norm.weight is missing"),
    "no head": ("flat", lambda _, t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
    "a spare weight": ("nested", set_tensor("mask_hidden", torch.zeros(WIDTH)), r"mask_hidden \[32\] has no place"),
    "two levels": ("flat", set_tensor("fc.weight", torch.zeros(WIDTH, 2 * WIDTH)), r"fc.weight is \[32, 64\]"),
    "own embedding": (
        "flat",
        set_tensor("embed_tokens.weight", torch.zeros(VOCAB, WIDTH)),
        "not the embedding of",
    ),
    "four layers": ("nested", set_top(eagle_aux_hidden_state_layer_ids=[1, 2, 3, 4]), "needed are three"),
    "a layer too far": ("flat", set_top(eagle_aux_hidden_state_layer_ids=[1, 2, 9]), "from 0 to 6"),
    "two opinions": (
        "flat",
        set_top(
            eagle_aux_hidden_state_layer_ids=[1, 2, 4],
            eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
        ),
        "not the same",
    ),
    "says too little": ("flat", lambda c, _: c.pop("rms_norm_eps"), "does not say rms_norm_eps"),
    "no draft": ("nested", lambda c, _: c.pop("speculators_model_type"), "none of the layouts"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_our_head_does_not_do_is_refused_by_name(target: Target, tmp_path: Path, what: str):
    layout, change, match = REFUSED[what]
    edit(LAYOUTS[layout][0](tmp_path / "theirs"), change)
    with pytest.raises(UserError, match=match):
        import_draft(target, str(tmp_path / "theirs"), str(tmp_path / "ours"))
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_a_copy_of_the_targets_embedding_is_no_obstacle(target: Target, tmp_path: Path):
    copy = target.hf_model.get_input_embeddings().weight.detach().half()
    edit(flat(tmp_path / "theirs"), set_tensor("embed_tokens.weight", copy))
    import_draft(target, str(tmp_path / "theirs"), str(tmp_path / "ours"))
    assert "embed_tokens.weight" not in read(tmp_path / "ours")[1]


def test_pickles_are_named_and_never_opened(target: Target, tmp_path: Path):
    folder = flat(tmp_path / "theirs")
    (folder / "model.safetensors").unlink()

    class Bomb:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return (Path.touch, (tmp_path / "opened",))  # type: ignore[return-value]

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(UserError, match=r"pytorch_model\.bin .* convert it: .* weights_only=True") as error:
        import_draft(target, str(folder), str(tmp_path / "ours"))
    assert "pytorch_model.bin pytorch_model.safetensors" in str(error.value)
    assert not (tmp_path / "opened").exists() and not (tmp_path / "ours").exists()


def test_folders_that_are_none_are_user_errors(target: Target, tmp_path: Path):
    def message(folder: Path) -> str:
        with pytest.raises(UserError) as error:
            import_draft(target, str(folder), str(tmp_path / "ours"))
        return str(error.value)

    assert "No checkpoint folder" in message(tmp_path / "none")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json" in message(empty)
    (empty / "config.json").write_text("[1]")
    assert "holds a list" in message(empty)
    (empty / "config.json").write_text("{}")
    assert "No weights" in message(empty)
    (empty / "model.safetensors").write_bytes(b"\x00" * 20)
    assert "Cannot read" in message(empty)
    twice = flat(tmp_path / "twice")
    save_file({"fc.weight": torch.zeros(1)}, twice / "part.safetensors")
    assert "fc.weight in more than one file" in message(twice)
