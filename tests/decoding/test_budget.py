"""What decoding takes is known before: within 5 % of what tensors were measured to take, and refused in time."""

from __future__ import annotations

import functools
import importlib
import re
from operator import attrgetter

import pytest
import torch
from live_tensors import PeakOfNewTensors, bytes_in

from selfspec import Decoder, Sampling, UserError, build_drafter, wrap_target
from selfspec.cache import Paged
from selfspec.decoding.budget import available_bytes
from selfspec.drafters.registry import DRAFTERS
from selfspec.target.fused import fuse
from tiny_models import prompt_ids, tiny_llama, tiny_model

TOLERANCE = 0.05
KEEPS_NOTHING = ("ngram",)
T1 = Sampling(temperature=1.0)
SETTINGS = {  # sampling, acceptance
    "greedy": (Sampling(), "auto"),
    "penalised": (Sampling(repetition_penalty=1.2), "auto"),
    "rejection": (T1, "rejection"),
    "coupled": (T1, "coupled"),
    "block": (T1, "block"),
    "typical": (T1, "typical"),
    "temperature": (Sampling(temperature=0.7), "rejection"),
    "top_k": (Sampling(temperature=0.7, top_k=50), "rejection"),
    "top_p": (Sampling(temperature=0.7, top_p=0.9), "rejection"),
    "min_p": (Sampling(temperature=1.0, min_p=0.1), "rejection"),
}


@functools.cache
def target(vocab_size, dtype):
    return wrap_target(tiny_llama(vocab_size=vocab_size, dtype=dtype, hidden_size=64))


def drafter_of(name, vocab_size, dtype):
    options = {
        "early_exit": {"exit_layer": 2},
        "reduced": {"exit_layer": 2, "d_vocab": 2000},
        "synthetic": {"accept_rate": 0.7, "cost_layers": 2},
    }.get(name, {})
    if name == "independent":
        options = {"model": wrap_target(tiny_llama(vocab_size=vocab_size, dtype=dtype, num_layers=2, seed=4))}
    kind = "early_exit" if name == "reduced" else name
    return None if name == "none" else build_drafter(kind, target(vocab_size, dtype), **options)


def compare(name, setting="greedy", vocab_size=8000, dtype=torch.float32, rows=2, num_drafted=4, cache="contiguous"):
    """(`Decoder.estimate`, its measured counterpart): weights, keys and values, draft, rows and working memory."""
    model = target(vocab_size, dtype)
    drafter = drafter_of(name, vocab_size, dtype)
    sampling, acceptance = SETTINGS[setting]
    decoder = Decoder(model, drafter, max_batch_rows=rows, cache=cache)
    prompts = [prompt_ids(5 + 30 * row, vocab_size=vocab_size) for row in range(rows)]
    options = dict(max_new_tokens=10, lookahead=num_drafted, sampling=sampling, acceptance=acceptance)
    estimate = decoder.estimate(prompts, **options)
    assert decoder.rows is None, "nothing is allocated by asking"
    assert estimate == decoder.estimate([len(ids) for ids in prompts], **options)
    decoder.decode(prompts, ignore_eos=True, **options)
    assert estimate == decoder.estimate(prompts, **options)
    with PeakOfNewTensors() as peak:
        decoder.decode(prompts, ignore_eos=True, **options)
    state = decoder.rows
    own_cache, draft_state = bytes_in(state.cache.storage), bytes_in(state.draft_state)
    state.draft_state = None
    measured = {
        "weight_bytes": bytes_in(model.hf_model),
        "kv_bytes": own_cache,
        "draft_weight_bytes": bytes_in(drafter, without=model),
        "draft_state_bytes": draft_state,
        "row_bytes": bytes_in(state, without=(model, state.cache.storage)),
        "working_bytes": peak.nbytes,
    }
    return estimate, measured


def check(estimate, measured):
    total = sum(measured.values())
    assert estimate.weight_bytes == pytest.approx(measured["weight_bytes"], rel=1e-3)
    assert estimate.draft_weight_bytes == pytest.approx(measured["draft_weight_bytes"], rel=0.01)
    assert estimate.kv_bytes == measured["kv_bytes"], "keys and values take exactly what the formula says"
    assert estimate.total_bytes == pytest.approx(total, rel=TOLERANCE), (estimate, measured)
    return estimate.working_bytes / measured["working_bytes"]


@pytest.mark.parametrize("setting", sorted(SETTINGS))
@pytest.mark.parametrize("num_drafted", [4, 12])
def test_every_way_of_judging_takes_what_was_counted(setting, num_drafted):
    """A vocabulary that outweighs everything else: working memory is a third of the total and more."""
    estimate, measured = compare("early_exit", setting, num_drafted=num_drafted)
    assert check(estimate, measured) == pytest.approx(1, rel=TOLERANCE)
    assert measured["working_bytes"] > 0.1 * sum(measured.values())


@pytest.mark.parametrize("name", ["none", "early_exit", "independent", "reduced"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache", ["contiguous", Paged(4)], ids=["contiguous", "paged"])
@pytest.mark.parametrize("setting", ["greedy", "rejection"])
def test_the_total_is_within_five_percent_for_each_drafter_dtype_and_storage(name, dtype, cache, setting):
    estimate, measured = compare(name, setting, dtype=dtype, cache=cache, rows=3)
    check(estimate, measured)
    assert estimate.draft_state_bytes == pytest.approx(measured["draft_state_bytes"], rel=0.1)
    assert estimate.row_bytes == pytest.approx(measured["row_bytes"], rel=0.25), "a few hundred numbers"


def test_scripted_drafts_are_counted_with_what_they_are_told():
    estimate, measured = compare("synthetic")
    check(estimate, measured)
    assert 0 < measured["draft_state_bytes"] == estimate.draft_state_bytes


def test_every_registered_drafter_says_what_it_keeps():
    """A new one that says nothing would pass for one that keeps nothing."""
    for kind, module_name in DRAFTERS.items():
        module = importlib.import_module(module_name)
        made = attrgetter(module.build.__annotations__["return"])(module)
        assert hasattr(made, "draft_bytes") or kind in KEEPS_NOTHING, kind


def test_an_estimate_refuses_what_decoding_would():
    decoder = Decoder(target(97, torch.float32), drafter_of("early_exit", 97, torch.float32), 2)
    for arguments, message in [
        (dict(prompts=[300]), "need 428 positions; wrapped has 256"),
        (dict(prompts=[[97]], max_new_tokens=4), "Token id 97 is not in the vocabulary"),
        (dict(prompts=[5], max_new_tokens=0), "max_new_tokens=0"),
        (dict(prompts=[5], lookahead=0), "num_drafted"),
        (dict(prompts=[5], acceptance="fast"), "acceptance"),
    ]:
        with pytest.raises(UserError, match=message):
            decoder.estimate(**arguments)
    one, two = decoder.estimate([100, 10], max_new_tokens=20), decoder.estimate([100] * 5, max_new_tokens=20)
    assert one.kv_bytes == two.kv_bytes == 2 * 128 * one.kv_bytes_per_token, "two rows, as long as the longest"


@pytest.mark.parametrize("vocab_size", [97, 4096, 49152])
def test_small_and_large_vocabularies(vocab_size):
    check(*compare("early_exit", "rejection", vocab_size=vocab_size, rows=1))


def test_an_estimate_without_the_working_memory_would_be_seen():
    """Negative control: the tolerance is narrower than what there is to forget."""
    estimate, measured = compare("early_exit", "rejection")
    total = sum(measured.values())
    for name in ("working_bytes", "kv_bytes", "weight_bytes"):
        left = estimate.total_bytes - getattr(estimate, name)
        assert name == "kv_bytes" or left != pytest.approx(total, rel=TOLERANCE)


LONG = {  # what is counted in working memory beside a plain layer's own tensors
    "llama": "one mask",
    "qwen2_sliding": "a mask for each window",
    "gemma2": "two masks, and scores",
    "fused": "cosines and sines per head",
    "independent": "a draft's masks, after the target's are gone",
}


@pytest.mark.parametrize("length", [400, 1500])
@pytest.mark.parametrize("name", LONG)
def test_a_long_prompt_takes_what_was_counted(name, length):
    """Run 512 tokens at once, its masks outweigh keys and values."""
    family = name if name in ("qwen2_sliding", "gemma2") else "llama"
    shape = {"max_positions": 2048, "hidden_size": 128, "num_kv_heads": 2}
    model = wrap_target(tiny_model(family, **shape))
    if name == "fused" and not fuse(model):
        pytest.skip("weights cannot be packed here")
    drafter = None
    if name == "independent":
        drafter = build_drafter("independent", model, model=wrap_target(tiny_model("llama", num_layers=2, **shape)))
    decoder, prompt = Decoder(model, drafter), prompt_ids(length)
    estimate = decoder.estimate([prompt], max_new_tokens=4)
    decoder.decode([prompt], max_new_tokens=4, ignore_eos=True)
    with PeakOfNewTensors() as peak:
        decoder.decode([prompt], max_new_tokens=4, ignore_eos=True)
    assert 0.8 < peak.nbytes / estimate.working_bytes < 1.15


def test_a_short_prompt_is_judged_as_the_long_one_that_its_rows_could_hold():
    """Rows are used again for requests of the same length, whatever part of it is the prompt."""
    model = wrap_target(tiny_model("llama", max_positions=2048))
    long, short = [prompt_ids(1000)], [prompt_ids(20)]
    needed = Decoder(model).estimate(long, max_new_tokens=4).allocated_bytes
    for prompts, count in ((long, 4), (short, 984)):
        with pytest.raises(UserError, match="requests of up to") as refused:
            Decoder(model, memory_limit_bytes=needed - 1).decode(prompts, max_new_tokens=count)
        length = int(re.search(r"requests of up to (\d+)", str(refused.value))[1])
        for prompt_len in (2, length - 2):
            decoder = Decoder(model, memory_limit_bytes=needed - 1)
            assert decoder.decode([prompt_ids(prompt_len)], max_new_tokens=length - prompt_len)
    Decoder(model, memory_limit_bytes=needed).decode(short, max_new_tokens=4)


def refusal(rows, length, limit, name="independent", setting="rejection", **options):
    """The message of a refused call, and (rows, tokens) it says would fit."""
    model = target(8000, torch.float32)
    decoder = Decoder(model, drafter_of(name, 8000, torch.float32), rows, memory_limit_bytes=limit, **options)
    sampling, acceptance = SETTINGS[setting]
    prompts = [prompt_ids(length - 10, vocab_size=8000)] * rows
    with pytest.raises(UserError) as refused:
        decoder.decode(prompts, max_new_tokens=10, lookahead=4, sampling=sampling, acceptance=acceptance)
    message = str(refused.value)
    found = re.search(r"max_batch_rows up to (\d+), or requests of up to (\d+) tokens", message)
    return message, found and (int(found[1]), int(found[2]))


def decodes(rows, length, limit, name="independent", setting="rejection", **options):
    model = target(8000, torch.float32)
    decoder = Decoder(model, drafter_of(name, 8000, torch.float32), rows, memory_limit_bytes=limit, **options)
    sampling, acceptance = SETTINGS[setting]
    prompts = [prompt_ids(length - 2, vocab_size=8000)] * rows
    decoder.decode(prompts, max_new_tokens=2, lookahead=4, sampling=sampling, acceptance=acceptance)
    return True


@pytest.mark.parametrize("cache", ["contiguous", "paged"])
def test_what_does_not_fit_is_refused_with_the_rows_and_the_length_that_do(cache, monkeypatch):
    limit = 16 * 2**20
    with monkeypatch.context() as patched:
        patched.setattr("selfspec.decoding.decoder.make_cache", None)
        patched.setattr("selfspec.decoding.decoder.run_requests", None)
        message, (rows, length) = refusal(20, 200, limit, cache=cache)
    assert re.search(
        r"20 rows of up to 205 tokens .* need 1\d\.\d+ MiB beside the weights \(keys and values .* MiB, draft", message
    )
    assert "free on cpu are 16.00 MiB" in message
    assert 1 <= rows < 20 and 1 < length < 200
    assert decodes(rows, 200, limit, cache=cache) and decodes(20, length, limit, cache=cache)
    for too_many in [(rows + 1, 200), (20, length + 64 + 1)]:
        with pytest.raises(UserError, match="Would fit"):
            decodes(*too_many, limit, cache=cache)


def test_with_a_given_number_of_blocks_it_is_the_blocks_that_are_too_many():
    message, _ = refusal(4, 40, 4_000_000, cache=Paged(16, num_blocks=5000))
    blocks = int(re.search(r"Would fit: num_blocks up to (\d+)\.", message)[1])
    assert decodes(4, 40, 4_000_000, cache=Paged(16, num_blocks=blocks))
    assert f"num_blocks up to {blocks}." in refusal(4, 40, 4_000_000, cache=Paged(16, num_blocks=blocks + 1))[0]


def test_a_refusal_leaves_what_was_there_and_says_when_nothing_fits():
    model = target(8000, torch.float32)
    decoder = Decoder(model, max_batch_rows=2, memory_limit_bytes=600_000)
    prompt = prompt_ids(5)
    first = decoder.decode([prompt], max_new_tokens=3, reuse=True)[0]
    cache = decoder.rows.cache
    with pytest.raises(UserError, match=r"2 rows of up to 255 tokens \(prompt, output, one round\) need"):
        decoder.decode([prompt_ids(200)], max_new_tokens=54)
    assert decoder.rows.cache is cache
    again = decoder.decode([prompt], max_new_tokens=3, reuse=True)[0]
    assert again.token_ids == first.token_ids and again.num_reused_tokens == 4
    assert "Would fit: nothing; free some memory first" in refusal(4, 20, 1000)[0]


def test_an_absurd_number_of_rows_is_refused_without_a_limit_given():
    with pytest.raises(UserError, match=r"free on cpu are .*Would fit: max_batch_rows up to \d+"):
        Decoder(target(97, torch.float32), max_batch_rows=10**9).decode([prompt_ids(5)], max_new_tokens=3)


def test_what_is_free_is_read_from_the_machine_and_from_its_container(monkeypatch, tmp_path):
    cpu = torch.device("cpu")
    free = available_bytes(cpu)
    assert free is None or 2**20 < free < 2**50
    limit, usage = tmp_path / "limit", tmp_path / "usage"
    monkeypatch.setattr("selfspec.decoding.budget.CGROUP_LIMITS", [(str(limit), str(usage))])
    assert available_bytes(cpu) == pytest.approx(free, rel=0.2), "no such files"
    limit.write_text("5000000\n")
    usage.write_text("3000000\n")
    assert available_bytes(cpu) == 2_000_000
    limit.write_text("max\n")
    assert available_bytes(cpu) == pytest.approx(free, rel=0.2)
