"""Transforms, draws and rules never read the device from the host and never copy a host tensor to it.

They run here on torch's `meta` device, where nothing has a value: a host read raises, and every operator is recorded to
find tensors of another device. That is what capturing a round in a CUDA graph needs.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from selfspec.sampling import NoiseKey, Prefix, Sampling, build_rule, build_transforms
from selfspec.sampling.acceptance.tree import Tree
from selfspec.sampling.acceptance.tree_rules import build_tree_rule

B, K, V, S = 2, 3, 50, 16
EVERYTHING = dict(
    top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.1,
    no_repeat_ngram_size=2, logit_bias={1: 2.0}, suppress_tokens=(3,),
)  # fmt: skip


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.foreign: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
        if any(tensor.device.type != "meta" for tensor in tensors):
            self.foreign.append(str(func))
        return out


def integers(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64, device="meta")


@pytest.mark.parametrize("seed", ["number", "tensor"])
@pytest.mark.parametrize("name", ["greedy", "rejection", "coupled", "block", "typical"])
def test_chain_rules_stay_on_the_device(name: str, seed: str) -> None:
    sampling = Sampling(temperature=0.0 if name == "greedy" else 0.7, **EVERYTHING)
    transforms, rule = build_transforms(sampling), build_rule(name, sampling)
    logits_BTV = torch.empty(B, K + 1, V, device="meta")
    prefix = Prefix(integers(B, S), integers(B, K + 1), integers(B))
    key = NoiseKey(3 if seed == "number" else integers(), integers(B), integers(B), step=1)
    transforms(logits_BTV, prefix)  # the first call moves the constants over
    with Recorder() as recorder:
        p_BTV = transforms(logits_BTV, prefix)
        token_B, q_BV = rule.draw(p_BTV[:, 0], key)
        q_BKV = None if q_BV is None else torch.stack([q_BV] * K, 1)
        verdict = rule.accept(torch.stack([token_B] * K, 1), q_BKV, integers(B), p_BTV, key)
        rule.accept(integers(B, 0), None, integers(B), p_BTV[:, :1], key)
    assert recorder.foreign == []
    assert {verdict.num_accepted_B.dtype, verdict.next_token_B.dtype, verdict.error_B.dtype} == {torch.int64}


@pytest.mark.parametrize("name", ["greedy", "rejection", "coupled"])
def test_tree_rules_stay_on_the_device(name: str) -> None:
    sampling = Sampling(temperature=0.0 if name == "greedy" else 0.7, repetition_penalty=1.2, no_repeat_ngram_size=2)
    transforms, rule = build_transforms(sampling), build_tree_rule(name, sampling)
    N, C = 7, 2
    ancestors = torch.zeros(B, N, N, dtype=torch.bool, device="meta")
    prefix = Prefix(integers(B, S), integers(B, N), integers(B), ancestors_BTN=ancestors)
    key = NoiseKey(3, integers(B), integers(B))
    with Recorder() as recorder:
        p_BNV = transforms(torch.empty(B, N, V, device="meta"), prefix)
        q_BNV = rule.draw_children(p_BNV, C, key, num_nodes=N, level=0, most_children=C).q_BnV
        rule.rank_children(p_BNV, C, key, level=0)
        rule.accept(Tree(integers(B, N), integers(B, N, C), 2, q_BNV), p_BNV, key)
    assert recorder.foreign == []


def test_a_host_read_and_a_host_tensor_would_be_noticed() -> None:
    """Negative control."""
    with pytest.raises(RuntimeError):
        bool(integers(1)[0] > 0)
    with Recorder() as recorder:
        integers(1) + torch.tensor(1)
    assert recorder.foreign
