"""How many tokens of a prompt are run at once is the device's affair: no token depends on it."""

from __future__ import annotations

import pytest

from selfspec import Decoder, build_drafter, wrap_target
from selfspec.cache.storage import PREFILL_TOKENS, PREFILL_TOKENS_CPU, prefill_tokens
from selfspec.decoding import rows as rows_module
from tiny_models import prompt_ids, tiny_llama

LENGTHS = (150, 1, 65, 9, 200, 130)
PROMPTS = [prompt_ids(length, seed=length) for length in LENGTHS]
TARGET = wrap_target(tiny_llama())
DRAFTERS = {
    "none": lambda: None,
    "early_exit": lambda: build_drafter("early_exit", TARGET, exit_layer=2),
    "independent": lambda: build_drafter("independent", TARGET, model=wrap_target(tiny_llama(seed=5, num_layers=2))),
}


def decoded(name, cache="contiguous", on_round=None):
    decoder = Decoder(TARGET, DRAFTERS[name](), 3, cache=cache)
    outputs = decoder.decode(PROMPTS, max_new_tokens=12, ignore_eos=True, on_round=on_round)
    return [output.token_ids for output in outputs]


def test_a_cpu_keeps_its_one_shape_and_a_gpu_gets_work_enough():
    assert prefill_tokens(on_cpu=True) == PREFILL_TOKENS_CPU == 64
    assert prefill_tokens(on_cpu=False) == PREFILL_TOKENS == 512
    assert rows_module.Rows(TARGET, 1, 100).prefill_width == 64


@pytest.mark.parametrize("cache", ["contiguous", "paged"])
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("width", [128, 512])
def test_wider_chunks_leave_every_token_as_it_was(width, name, cache, monkeypatch):
    expected = decoded(name, cache)
    monkeypatch.setattr(rows_module, "prefill_tokens", lambda on_cpu: width)
    seen = []
    inner = rows_module.Rows.prompt_passes

    def passes(self, *arguments):
        for pass_, chunk in inner(self, *arguments):
            seen.append(chunk.positions_BT.shape[1])
            yield pass_, chunk

    monkeypatch.setattr(rows_module.Rows, "prompt_passes", passes)
    assert decoded(name, cache) == expected
    # 150 and 200 tokens in chunks of up to `width`, the last one padded to a multiple of 64 (the row has 256 slots)
    assert max(seen) == min(width, 256) and set(seen) <= {64, 128, 192, 256}
