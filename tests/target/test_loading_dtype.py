"""A model loaded in half precision keeps in float32 what transformers keeps in float32."""

from __future__ import annotations

import pytest
import torch

from selfspec import load_target
from selfspec.target.byte_tokenizer import byte_tokenizer
from tiny_models import tiny_llama


@pytest.mark.parametrize("source", ["random", "folder"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotary_frequencies_are_never_rounded(dtype, source, tmp_path):
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    name = "random-tiny" if source == "random" else str(tmp_path)
    target = load_target(name, dtype, "cpu", fused=False)
    head_dim = target.layer_shapes[0].head_dim
    exact = 10_000.0 ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    assert target._rotary.inv_freq.dtype == torch.float32
    torch.testing.assert_close(target._rotary.inv_freq, exact, rtol=1e-6, atol=0)
    assert {parameter.dtype for parameter in target.hf_model.parameters()} == {target.dtype} == {getattr(torch, dtype)}
