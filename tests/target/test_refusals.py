"""Models that would decode wrongly are refused when they are wrapped, by name and with the reason."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, LlamaForSequenceClassification, LlamaModel

from selfspec.config import RandomShape, TargetConfig
from selfspec.errors import UserError
from selfspec.target import load_target, wrap_target
from selfspec.target.families import family_of
from tiny_models import prompt_ids, tiny_llama, tiny_model

RECURRENT = ("mamba", "mamba2", "falcon_mamba", "rwkv", "jamba", "bamba", "zamba2", "recurrent_gemma", "falcon_h1")
RECURRENT += ("granitemoehybrid", "qwen3_next", "lfm2")
ENCODER_DECODERS = ("t5", "bart", "whisper", "t5gemma")
MULTIMODAL = ("gemma3", "llava", "qwen2_vl", "mllama")
OTHERS = ("gpt_oss", "bloom", "mpt", "bert", "llama4_text")


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        *((name, "recurrent state") for name in RECURRENT),
        *((name, "encoder-decoder") for name in ENCODER_DECODERS),
        *((name, "multimodal") for name in MULTIMODAL),
        *((name, "") for name in OTHERS),
    ],
)
def test_unsupported_architectures_are_refused_by_name_with_the_reason(model_type, reason):
    config = CONFIG_MAPPING[model_type]()
    with pytest.raises(UserError, match=f"'{model_type}' is not supported: .*{reason}.*Supported are: .*llama"):
        family_of(config)


def test_layers_of_another_type_are_refused_also_in_a_supported_family():
    model = tiny_model("qwen3")
    model.config.layer_types = ["full_attention", "chunked_attention", "full_attention", "full_attention"]
    with pytest.raises(UserError, match="'chunked_attention'"):
        wrap_target(model)
    model.config.layer_types = ["full_attention", "linear_attention", "full_attention", "full_attention"]
    with pytest.raises(UserError, match="recurrent state"):
        wrap_target(model)


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("falcon", {"alibi": True}, "alibi"),
        ("opt", {"word_embed_proj_dim": 16}, "word_embed_proj_dim"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_variants_of_supported_families_that_would_be_wrong_are_refused(name, settings, reason):
    with pytest.raises(UserError, match=f"not supported, because of {reason}"):
        wrap_target(tiny_model(name, **settings))


def test_falcon_built_for_flash_attention_is_refused():
    model = tiny_model("falcon")
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(UserError, match="attn_implementation='sdpa'"):
        wrap_target(model)


@pytest.mark.parametrize("model_class", [LlamaModel, LlamaForSequenceClassification])
def test_models_without_a_language_model_head_are_refused(model_class):
    with pytest.raises(UserError, match=f"{model_class.__name__} has no .* not the causal LM"):
        wrap_target(model_class(tiny_llama().config))


def test_weights_that_are_cut_by_hand_are_refused():
    """One process is enough to have weights that are cut, and not by transformers' plan."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = tiny_llama()
        projection = model.model.layers[0].self_attn.q_proj
        cut = distribute_tensor(projection.weight.data, init_device_mesh("cpu", (1,)), [Shard(0)])
        projection.weight = torch.nn.Parameter(cut, requires_grad=False)
        with pytest.raises(UserError, match=r"not by transformers' tensor-parallel plan.*tensor_parallel="):
            wrap_target(model)
    finally:
        dist.destroy_process_group()


def test_a_model_on_two_devices_is_refused():
    model = tiny_llama()
    model.model.layers[2].to("meta")
    with pytest.raises(UserError, match=r"\['cpu', 'meta'\].*one device"):
        wrap_target(model)


def test_weights_that_were_never_loaded_are_refused():
    with pytest.raises(UserError, match="meta device"):
        wrap_target(tiny_llama().to("meta"))


def test_mixed_dtypes_and_half_precision_on_a_cpu_are_refused():
    model = tiny_llama()
    model.model.norm.to(torch.bfloat16)
    with pytest.raises(UserError, match=r"bfloat16.*float32"):
        wrap_target(model)
    with pytest.raises(UserError, match="float16 on a CPU"):
        wrap_target(tiny_llama(dtype=torch.float16))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(value):
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = value
    with pytest.raises(UserError, match=r"1 of .* NaN or infinite .* model\.layers\.1\.mlp\.up_proj\.weight"):
        wrap_target(model)


def test_a_configuration_shortened_behind_the_models_back_is_refused():
    """What an exception inside transformers' assisted early exit leaves behind."""
    model = tiny_llama()
    model.config.num_hidden_layers = 2
    with pytest.raises(UserError, match="4 layers, its configuration says 2"):
        wrap_target(model)


@pytest.mark.parametrize("family", ["gpt2", "opt", "falcon", "qwen3_moe", "nonsense"])
def test_random_targets_whose_shape_would_not_be_the_one_asked_for_are_refused(family):
    with pytest.raises(UserError, match=f"target.family='{family}'"):
        load_target(TargetConfig(kind="random", family=family, shape=RandomShape(vocab_size=300)))


def test_a_refused_model_still_works():
    model = tiny_llama()
    before = model(torch.tensor([prompt_ids(5)])).logits
    model.config.model_type = "mamba"
    with pytest.raises(UserError):
        wrap_target(model)
    assert torch.equal(model(torch.tensor([prompt_ids(5)])).logits, before)
