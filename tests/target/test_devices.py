"""Which device a model is loaded on, and what is said where there is none: without a GPU, with a stand-in for CUDA."""

from __future__ import annotations

import pytest
import torch

from selfspec import UserError
from selfspec.target import load_target
from selfspec.target.loading import choose_device


@pytest.fixture
def machine(monkeypatch):
    """`machine(built_for, gpus)`: what torch says of itself."""

    def pretend(built_for, gpus):
        monkeypatch.setattr(torch.version, "cuda", built_for)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)

    return pretend


@pytest.mark.parametrize(
    ("built_for", "gpus", "device", "message"),
    [
        (None, 0, "cuda", "built without CUDA. Use device='cpu'"),
        ("13.0", 0, "cuda", "sees no GPU .*CUDA_VISIBLE_DEVICES.* Use device='cpu'"),
        ("13.0", 0, "cuda:1", "sees no GPU"),
        ("13.0", 2, "cuda:2", "sees 2 GPUs. Allowed: cpu, cuda:0 to cuda:1"),
        ("13.0", 2, "cuda:two", "is not a device"),
        (None, 0, "gpu", "is not a device. Allowed: auto, cpu, cuda"),
    ],
)
def test_a_device_that_is_not_there_is_refused_before_anything_is_loaded(machine, built_for, gpus, device, message):
    machine(built_for, gpus)
    with pytest.raises(UserError, match=message):
        load_target("random-tiny", device=device)


def test_auto_is_a_gpu_where_there_is_one_also_in_a_build_for_cuda(machine):
    machine("13.0", 0)
    assert choose_device("auto").type == "cpu"
    assert load_target("random-tiny", device="auto").device.type == "cpu"
    machine("13.0", 2)
    assert [str(choose_device(name)) for name in ("auto", "cuda", "cuda:1", "cpu")] == ["cuda", "cuda", "cuda:1", "cpu"]
