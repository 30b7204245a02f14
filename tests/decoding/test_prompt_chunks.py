"""How many tokens of a prompt are run at once is the device's affair: no token depends on it."""

from __future__ import annotations

import pytest

from selfspec import Decoder, build_drafter, wrap_target
from selfspec.cache import storage
from selfspec.cache.storage import CHUNKS, CHUNKS_CPU, Chunks, prompt_chunks
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


def decoded(name, chunks, cache, max_batch_rows, monkeypatch):
    """(the tokens, how wide the passes over prompts were)"""
    widths = []
    inner = rows_module.Rows.prompt_passes

    def passes(self, *arguments):
        for pass_, chunk in inner(self, *arguments):
            widths.append(chunk.positions_BT.shape[1])
            yield pass_, chunk

    with monkeypatch.context() as patch:
        patch.setattr(storage, "CHUNKS_CPU", chunks)
        patch.setattr(rows_module.Rows, "prompt_passes", passes)
        decoder = Decoder(TARGET, DRAFTERS[name](), max_batch_rows, cache=cache)
        outputs = decoder.decode(PROMPTS, max_new_tokens=12, ignore_eos=True)
    return [output.token_ids for output in outputs], widths


def test_a_cpu_pads_little_and_a_gpu_gets_work_enough():
    assert prompt_chunks(on_cpu=True) == CHUNKS_CPU == Chunks(most=512, between_rounds=128, step=16)
    assert prompt_chunks(on_cpu=False) == CHUNKS == Chunks(most=512, between_rounds=512, step=64)
    assert rows_module.Rows(TARGET, 1, 100).chunks == CHUNKS_CPU
    assert [CHUNKS_CPU.padded(n) for n in (1, 16, 17, 100, 512)] == [16, 16, 32, 112, 512]


@pytest.mark.parametrize("cache", ["contiguous", "paged"])
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("chunks", [CHUNKS_CPU, CHUNKS, Chunks(128, 64, 64), Chunks(48, 16, 16)], ids=str)
def test_other_chunks_leave_every_token_as_it_was(chunks, name, cache, monkeypatch):
    expected, narrow = decoded(name, Chunks(64, 64, 64), cache, 3, monkeypatch)
    got, wide = decoded(name, chunks, cache, 3, monkeypatch)
    assert got == expected
    assert set(narrow) == {64} and all(width % chunks.step == 0 and width <= chunks.most for width in wide)
    assert max(wide) >= chunks.padded(min(LENGTHS[0] - 1, chunks.most)), "nobody waits for the first prompt"


def test_one_row_pads_every_prompt_to_a_few_shapes(monkeypatch):
    _, widths = decoded("none", CHUNKS_CPU, "contiguous", 1, monkeypatch)
    assert widths == [CHUNKS_CPU.padded(length - 1) for length in LENGTHS if length > 1] == [160, 64, 16, 208, 144]
