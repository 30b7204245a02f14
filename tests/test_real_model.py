"""The whole path on the real SmolLM2-135M: loaded by name, drafted for by its own layers, by another model and by
lookup.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from selfspec import Sampling, build_drafter, decode, load_target
from selfspec.target.packed import PackedLinear

INDEPENDENT = Path(__file__).parent.parent / "experiments/smollm2/drafts/independent"
PROMPTS = [
    [{"role": "user", "content": "Explain why the sky is blue in two sentences."}],
    "Water boils at",
]
pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def target(smollm2_dir):
    return load_target("smollm2-135m", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def expected(target):
    """The autoregressive outputs, checked against plain `generate`."""
    outputs = decode(target, None, PROMPTS, max_new_tokens=16)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokenizer = target.tokenizer
        if isinstance(prompt, str):
            ids = tokenizer(prompt)["input_ids"]
        else:
            ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
        plain = target.hf_generate(ids, 16, Sampling(), target.eos_token_ids)
        assert output.token_ids == plain.token_ids
        assert output.num_prompt_tokens == len(ids)
    return outputs


@pytest.mark.parametrize(
    "name, options",
    [("early_exit", {"exit_layer": 26}), ("ngram", {}), ("independent", {"model": str(INDEPENDENT)})],
)
def test_the_real_model_drafted_for_in_every_way_writes_the_same_tokens(target, expected, name, options):
    outputs = decode(target, build_drafter(name, target, **options), PROMPTS, max_new_tokens=16, max_batch_rows=2)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert [output.text for output in outputs] == [output.text for output in expected]
    assert any(record.num_accepted for output in outputs for record in output.rounds)


def test_the_text_is_the_models_own_and_ends_where_it_should(target, expected):
    assert "scatter" in expected[0].text.lower() or "light" in expected[0].text.lower()
    assert expected[0].finish_reason == "length" and len(expected[0].token_ids) == 16
    short = decode(target, None, PROMPTS[:1], max_new_tokens=16, stop_strings=[" "])[0]
    assert short.finish_reason == "stop_string" and " " not in short.text


def test_float16_holds_every_weight_of_it_and_a_step_reads_half_the_bytes(target):
    weights = [weight for weight in target.hf_model.parameters() if weight.dim() == 2]
    assert sum(weight.numel() for weight in weights) == target.step_weights > 134_000_000
    assert all(torch.equal(weight.half().float(), weight) for weight in weights)
    if PackedLinear(torch.eye(16), None).layout == "half":
        assert target.step_bytes == 2 * target.step_weights
