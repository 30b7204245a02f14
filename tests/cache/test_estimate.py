"""Memory from a configuration alone: weights to the byte, for every family whose layers are known, packed or plain."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from selfspec import UserError, wrap_target
from selfspec.cache import Paged, kv_bytes_per_slot
from selfspec.cache.estimate import (
    KNOWN_LAYERS,
    Call,
    config_of_random,
    estimate,
    shape_from_config,
    ways_to_fit,
    working_bytes,
)
from selfspec.config import SamplingConfig, TargetConfig, load_conf
from selfspec.decoding.budget import shape_of
from selfspec.target.packed import packing_available
from tiny_models import tiny_model

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", KNOWN_LAYERS)
def test_the_shape_from_a_config_is_the_loaded_models(family, tied, dtype):
    target = wrap_target(tiny_model(family, tied=tied, dtype=getattr(torch, dtype)))
    assert shape_from_config(target.config.to_dict(), dtype) == shape_of(target)


def test_biases_where_the_config_has_them():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_bias=True, mlp_bias=True, eos_token_id=2, bos_token_id=1,
    )  # fmt: skip
    assert shape_from_config(config.to_dict()) == shape_of(wrap_target(LlamaForCausalLM(config)))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.skipif(not packing_available(torch.float32, torch.device("cpu")), reason="no packed weights here")
def test_packed_weights_are_counted_as_the_packed_target_counts_them(tied):
    from selfspec.target.fused import fuse

    target = wrap_target(tiny_model("llama", tied=tied))
    config = target.config.to_dict()
    assert fuse(target, reload=lambda: None)
    packed = shape_from_config(config, packed=True).weight_bytes
    assert packed == pytest.approx(target.weight_bytes, rel=1e-3)
    assert (packed > shape_from_config(config).weight_bytes) == tied, "a tied embedding stays beside the packed head"


def test_known_sizes():
    """Llama-3.1-8B has 8,030,261,248 weights and 131,072 bytes of keys and values per token in bfloat16."""
    shape = shape_from_config(LLAMA_8B, "bfloat16")
    assert shape.weight_bytes == 2 * 8_030_261_248
    assert shape.kv_bytes_per_token == 131_072
    one = estimate(shape, Call(num_rows=1, needs=[8191], num_drafted=0))
    assert one.kv_bytes == 8192 * 131_072
    paged = estimate(shape, Call(num_rows=8, needs=[8000] + [100] * 7, storage=Paged(16)))
    assert paged.kv_bytes == (500 + 7 * 7 + 1) * 16 * 131_072


def test_the_draft_model_is_counted_with_its_cache():
    shape, small = shape_from_config(LLAMA_8B), shape_from_config({**LLAMA_8B, "num_hidden_layers": 2})
    call = Call(
        num_rows=4, needs=[1000] * 4, num_drafted=4, rule="rejection", draws_q=True, sampling=SamplingConfig(1.0)
    )
    alone, both = estimate(shape, call), estimate(shape, call, draft=small.draft_bytes)
    assert both.total_bytes - alone.total_bytes == small.weight_bytes + 4 * 1024 * small.kv_bytes_per_token
    assert both.allocated_bytes == both.total_bytes - shape.weight_bytes - small.weight_bytes
    head = estimate(shape, call, draft=lambda num_rows, capacity: (7, num_rows * capacity))
    assert (head.draft_weight_bytes, head.draft_state_bytes) == (7, 4000)


def test_working_memory_grows_with_drafts_rows_and_what_is_asked_of_the_logits():
    shape = shape_from_config(LLAMA_8B, "bfloat16")
    call = Call(num_rows=8, needs=[500] * 8, num_drafted=4, longest_prompt=60)
    greedy = working_bytes(shape, call)
    assert greedy == 8 * 5 * 128256 * 2, "the logits in their own dtype"
    sampled = replace(call, rule="rejection", draws_q=True, sampling=SamplingConfig(1.0))
    assert working_bytes(shape, sampled) == 8 * 128256 * 4 * (5 / 2 + 4 + 5 + 5 + 7)
    alone = Call(num_rows=1, needs=[500], num_drafted=0, longest_prompt=60)
    assert working_bytes(shape, sampled) > 8 * working_bytes(shape, alone)


def test_working_memory_knows_how_much_of_a_prompt_is_run_at_once():
    shape = shape_from_config(LLAMA_8B, "bfloat16")
    inside = (4 * 4096 + 3 * 14336 + 2 * 128 + 512 * 4) * 2  # per token, with its mask over 512 slots
    for prompt, on_cpu, tokens in ((401, True, 400), (402, True, 416), (402, False, 448), (None, True, 512)):
        call = Call(num_rows=1, needs=[500], longest_prompt=prompt, on_cpu=on_cpu)
        assert working_bytes(shape, call) == tokens * inside
    assert working_bytes(shape, Call(num_rows=1, needs=[20], longest_prompt=1)) == 128256 * 2, "one row of logits"


def test_the_random_targets_in_conf():
    for name in ("random-1b", "random-8b"):
        conf = load_conf("target", name)
        target = TargetConfig(kind="random", family=conf.family)
        for key, value in conf.shape.items():
            setattr(target.shape, str(key), value)
        shape = shape_from_config(config_of_random(target), "bfloat16")
        assert shape.weight_bytes / 2e9 == pytest.approx({"random-1b": 1.2, "random-8b": 8.0}[name], rel=0.1)
        assert shape.kv_bytes_per_token == kv_bytes_per_slot_of(conf.shape)


def kv_bytes_per_slot_of(shape):
    from selfspec.cache import LayerShape

    dim = shape.get("head_dim") or shape.hidden_size // shape.num_heads
    return kv_bytes_per_slot([LayerShape(shape.num_kv_heads, dim)] * shape.num_layers, torch.bfloat16)


def test_ways_to_fit_are_the_largest_that_do():
    shape = shape_from_config(LLAMA_8B, "bfloat16")
    call = Call(num_rows=64, needs=[4000] * 64, num_drafted=4)
    limit = 10 * 2**30
    ways = ways_to_fit(shape, call, limit)
    rows, tokens = (int("".join(filter(str.isdigit, way))) for way in ways)
    assert estimate(shape, Call(num_rows=rows, needs=[4000] * rows, num_drafted=4)).allocated_bytes <= limit
    assert estimate(shape, Call(num_rows=rows + 1, needs=[4000] * (rows + 1), num_drafted=4)).allocated_bytes > limit
    assert estimate(shape, Call(num_rows=64, needs=[tokens + 5] * 64, num_drafted=4)).allocated_bytes <= limit
    assert estimate(shape, Call(num_rows=64, needs=[tokens + 6] * 64, num_drafted=4)).allocated_bytes > limit


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(UserError, match="model_type='gpt2' cannot be counted. Allowed: llama, mistral, qwen2, qwen3"):
        shape_from_config({"model_type": "gpt2"})
    with pytest.raises(UserError, match="dtype='float8' is unknown"):
        shape_from_config(LLAMA_8B, "float8")


def test_no_torch_is_needed():
    code = "import sys, selfspec.cache.estimate; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


RESIDENT = """
import ctypes, gc, os
import torch
torch.set_num_threads(1)
from selfspec.config import RandomShape, TargetConfig
from selfspec.cache.estimate import config_of_random, shape_from_config
from selfspec.target import load_target
config = TargetConfig(kind="random", shape=RandomShape(768, 2048, 6, 12, 4, None, 16000, 512, {tied}))
load_target(TargetConfig(kind="random"))  # what a first load allocates for good
def resident():
    gc.collect(); ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
before = resident()
target = load_target(config, dtype="float32", device="cpu", fused={fused})
print(resident() - before, shape_from_config(config_of_random(config), "float32", packed={fused}).weight_bytes)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.skipif(not packing_available(torch.float32, torch.device("cpu")), reason="no packed weights here")
@pytest.mark.parametrize("tied, fused", [(True, True), (False, True), (True, False)])
def test_resident_memory_of_loaded_weights_is_within_five_percent(tied, fused):
    """200 to 270 MB of weights in a process of its own: packing does not double them."""
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT.format(tied=tied, fused=fused)], capture_output=True, text=True, check=True
    )
    grown, estimated = map(int, done.stdout.split())
    assert grown == pytest.approx(estimated, rel=0.05)
