"""Noise, draws and verdicts are the same on CPU and GPU; the attention that runs there, and the memory it takes."""

from __future__ import annotations

import pytest
import torch
from cases import RULES, drafters_for, target_on

from selfspec import Decoder, Sampling
from selfspec.decoding.capture import CudaRecorder
from selfspec.decoding.sampler import Sampler
from selfspec.sampling import NoiseKey, Prefix, build_rule, build_transforms, gumbel, uniforms
from selfspec.target.attention import attention_backends, grouped_attention
from tiny_models import prompt_ids

pytestmark = pytest.mark.gpu
V = 49152  # large: other kernels sort, sum and search here than in a tiny vocabulary


def test_noise_is_the_same_bit_for_bit():
    requests, positions = torch.arange(5), torch.arange(5) * 7
    for seed in (0, 3, -1, 2**62):
        on_cpu = uniforms(seed, requests, positions, 1, 64)
        assert torch.equal(uniforms(seed, requests.cuda(), positions.cuda(), 1, 64).cpu(), on_cpu)
        seed_there = torch.tensor(seed, device="cuda")
        assert torch.equal(uniforms(seed_there, requests.cuda(), positions.cuda(), 1, 64).cpu(), on_cpu)
    grid = positions[:, None] + torch.arange(3)
    there = gumbel(3, requests.cuda(), grid.cuda(), V).cpu()
    torch.testing.assert_close(there, gumbel(3, requests, grid, V), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", sorted(RULES))
def test_verdicts_are_the_same(name):
    """Logits on a coarse grid, so that rounding in softmax decides nothing; the rule itself draws the drafts."""
    B, K = 4, 4
    sampling = RULES[name].get("sampling", Sampling())
    if sampling.repetition_penalty != 1:
        pytest.skip("needs the tokens of rows; compared in test_graphs.py")
    rule = build_rule(RULES[name].get("acceptance", "auto"), sampling)
    generator = torch.Generator().manual_seed(0)
    logits_BTV = (torch.randn(B, K + 1, V, generator=generator) * 4).round() * 2
    verdicts = []
    for device in ("cpu", "cuda"):
        sampler = Sampler(build_transforms(sampling, None, V), rule, 5)
        p_BTV = sampler.transforms(logits_BTV.to(device))
        positions = (torch.arange(B, device=device), torch.full((B,), 9, device=device))
        draws = [rule.draw(p_BTV[:, k], NoiseKey(5, *positions, step=k)) for k in range(K)]
        tokens_BK = torch.stack([token for token, _ in draws], 1)
        q_BKV = torch.stack([q for _, q in draws], 1) if rule.needs_q else None
        many_B = torch.full((B,), K, device=device)
        verdict = rule.accept(tokens_BK, q_BKV, many_B, p_BTV, NoiseKey(5, *positions))
        verdicts.append([tokens_BK.tolist(), verdict.num_accepted_B.tolist(), verdict.next_token_B.tolist()])
    assert verdicts[0] == verdicts[1]


@pytest.mark.parametrize("name", sorted(RULES))
@torch.inference_mode()
def test_sampling_from_a_large_vocabulary_can_be_captured(name):
    B, K = 2, 3
    sampling = RULES[name].get("sampling", Sampling())
    rule = build_rule(RULES[name].get("acceptance", "auto"), sampling)
    transforms = build_transforms(sampling, None, V)
    logits_BTV = torch.randn(B, K + 1, V, device="cuda") * 3
    tokens_BS = torch.randint(0, V, (B, 64), device="cuda")
    prefix = Prefix(tokens_BS, torch.full((B, K + 1), 20, device="cuda"), torch.full((B,), 9, device="cuda"))
    seed, rows_B = torch.tensor(0, device="cuda"), torch.arange(B, device="cuda")
    out: list[torch.Tensor] = []

    def part():
        p_BTV = transforms(logits_BTV, prefix)
        key = (seed, rows_B, torch.full_like(rows_B, 9))
        draws = [rule.draw(p_BTV[:, k], NoiseKey(*key, step=k)) for k in range(K)]
        q_BKV = torch.stack([q for _, q in draws], 1) if rule.needs_q else None
        drafted_BK = torch.stack([token for token, _ in draws], 1)
        verdict = rule.accept(drafted_BK, q_BKV, torch.full_like(rows_B, K), p_BTV, NoiseKey(*key))
        out[:] = [torch.cat([drafted_BK, verdict.num_accepted_B[:, None], verdict.next_token_B[:, None]], 1)]

    recording = CudaRecorder(logits_BTV.device).record([part])
    captured = out[0]
    for value in (1, 2):
        seed.fill_(value)
        logits_BTV.copy_(torch.randn(B, K + 1, V) * 3)
        recording.graphs[0].replay()
        replayed = captured.tolist()
        part()
        assert replayed == out[0].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 5, 64])
@pytest.mark.parametrize("num_slots", [256, 2048])
def test_every_attention_backend_agrees_with_the_plain_formula(dtype, width, num_slots, record_property):
    B, G, R, D = 2, 4, 4, 64
    generator = torch.Generator().manual_seed(1)
    kv = torch.randn(B, num_slots, 2 * G, D, generator=generator).to("cuda", dtype)
    keys, values = kv.transpose(1, 2).chunk(2, dim=1)  # strided, as the cache's views are
    query = torch.randn(B, G * R, width, D, generator=generator).to("cuda", dtype)
    positions = torch.arange(width, device="cuda") + num_slots // 2
    hidden = torch.arange(num_slots, device="cuda") > positions[:, None]
    mask = torch.zeros(width, num_slots, device="cuda", dtype=dtype).masked_fill(hidden, -torch.inf)
    mask = mask.repeat(R, 1)[None, None].expand(B, 1, -1, -1)
    scores = query.float().view(B, G, R * width, D) @ keys.float().transpose(-1, -2) * D**-0.5 + mask.float()
    expected = (scores.softmax(-1) @ values.float()).view(B, G * R, width, D).transpose(1, 2)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    chosen, possible = attention_backends(query, keys, values, mask)
    record_property("attention", f"{chosen} of {', '.join(possible)}")
    for backend in [None, *possible]:
        allowed = [getattr(torch.nn.attention.SDPBackend, backend)] if backend else list(possible_backends())
        with torch.nn.attention.sdpa_kernel(allowed):
            out, _ = grouped_attention(torch.nn.Module(), query, keys, values, mask, scaling=D**-0.5)
        torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)


def possible_backends():
    names = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
    return (getattr(torch.nn.attention.SDPBackend, name) for name in names)


def test_the_cache_takes_what_the_formula_says():
    target = target_on("cuda")
    before = torch.cuda.memory_allocated()
    cache = target.make_cache(3, 700)
    assert cache.kv_bytes == 3 * 704 * 2 * 4 * sum(s.num_kv_heads * s.head_dim for s in target.layer_shapes)
    assert 0 <= torch.cuda.memory_allocated() - before - cache.kv_bytes <= 16384  # and the numbers of the slots


def test_bfloat16_runs_in_every_mode():
    target = target_on("cuda", torch.bfloat16)
    drafter = drafters_for(target)["early_exit"]
    for mode in ("eager", "split", "whole"):
        outputs = Decoder(target, drafter, 2, rounds=mode).decode(
            [prompt_ids(9), prompt_ids(40)], max_new_tokens=50, ignore_eos=True
        )
        assert [len(o.token_ids) for o in outputs] == [50, 50]
