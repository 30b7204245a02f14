"""On a GPU: the same noise as on CPU, and a whole round's sampling inside one CUDA graph."""

from __future__ import annotations

import pytest
import torch

from selfspec.sampling import NoiseKey, Sampling, build_rule, build_transforms, gumbel, uniforms
from selfspec.sampling.noise import STREAM_DRAFT

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_noise_is_the_same_on_every_device() -> None:
    requests, positions = torch.arange(5), torch.arange(5) * 7
    on_cpu = uniforms(3, requests, positions, STREAM_DRAFT, 4)
    assert torch.equal(uniforms(3, requests.cuda(), positions.cuda(), STREAM_DRAFT, 4).cpu(), on_cpu)
    grid = positions[:, None] + torch.arange(3)
    on_gpu = gumbel(3, requests.cuda(), grid.cuda(), 1000).cpu()
    torch.testing.assert_close(on_gpu, gumbel(3, requests, grid, 1000), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["greedy", "rejection", "coupled", "block", "typical"])
def test_a_round_of_sampling_can_be_captured_and_replayed(name: str) -> None:
    B, K, V = 2, 3, 1000
    sampling = Sampling(temperature=0.0 if name == "greedy" else 0.8, top_k=50, top_p=0.9)
    transforms, rule = build_transforms(sampling), build_rule(name, sampling)
    logits_BTV = torch.randn(B, K + 1, V, device="cuda")
    seed = torch.zeros((), dtype=torch.int64, device="cuda")
    key_parts = (seed, torch.arange(B, device="cuda"), torch.full((B,), 9, device="cuda"))
    num_drafted_B = torch.full((B,), K, device="cuda")

    def round_of_sampling() -> list[torch.Tensor]:
        p_BTV = transforms(logits_BTV)
        drafts = [rule.draw(p_BTV[:, k], NoiseKey(*key_parts, step=k)) for k in range(K)]
        q_BKV = torch.stack([q for _, q in drafts], 1) if rule.needs_q else None
        verdict = rule.accept(
            torch.stack([token for token, _ in drafts], 1), q_BKV, num_drafted_B, p_BTV, NoiseKey(*key_parts)
        )
        return [verdict.num_accepted_B, verdict.next_token_B, verdict.error_B]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        round_of_sampling()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = round_of_sampling()
    for value in (1, 2):
        seed.fill_(value)
        logits_BTV.copy_(torch.randn(B, K + 1, V))
        graph.replay()
        for got, want in zip(captured, round_of_sampling(), strict=True):
            assert torch.equal(got, want)
