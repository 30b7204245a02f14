"""A round on a device that is not the CPU and has no numbers at all: torch's "meta" stands for a GPU.

Whatever reads a tensor on the host fails there, whatever was made on the CPU by mistake is seen, and the code takes the
branches it takes on CUDA (argmax, sorting, noise). Only kernels are missing.
"""

from __future__ import annotations

import pytest
import torch
from cases import DRAFTERS, PAIRS, RULES, drafters_for
from torch.utils._python_dispatch import TorchDispatchMode

from selfspec import Sampling, wrap_target
from selfspec.decoding.capture import tensors_in
from selfspec.decoding.drafting import Drafting
from selfspec.decoding.round import decode_round, prefill
from selfspec.decoding.rows import Rows
from selfspec.decoding.sampler import Sampler
from selfspec.decoding.stopwatch import Stopwatch
from selfspec.lookahead import Plan
from selfspec.sampling import build_rule, build_transforms
from selfspec.target import stack
from tiny_models import prompt_ids, tiny_llama

META = torch.device("meta")


class OnlyThere(TorchDispatchMode):
    """Fails for operators that take a tensor from the CPU, or move one from device to device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        numbers = str(func) in ("aten.lift_fresh.default", "aten.fill_.Tensor")  # tensor[...] = number
        for tensor in tensors_in((args, tuple(kwargs.values()))):
            assert numbers or tensor.device == META, f"{func} takes a tensor on {tensor.device}"
        assert kwargs.get("device") in (None, META), f"{func} makes one on {kwargs['device']}"
        return func(*args, **kwargs)


@pytest.fixture(scope="module")
def on_meta():
    """The target and every drafter, without weights; what reads weights when a target is made is left out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack, "check_weights", lambda model: None)
        target = wrap_target(tiny_llama(max_positions=1024).to(META))
        yield target, drafters_for(target)


def placed(target, drafter):
    rows = Rows(target, 2, 100)
    rows.set_eos([2, 5])
    drafter.start(rows)
    prompts = [prompt_ids(9 + row, seed=row) for row in range(2)]
    if hasattr(drafter, "learn"):
        drafter.learn([[*ids, *range(20)] for ids in prompts])
    for row, ids in enumerate(prompts):
        rows.place(row, ids, 60, row)
        prefill(target, drafter, rows, row, 0, len(ids) - 1)
    return rows


PAIRS = [(drafter, rule) for drafter, rule in PAIRS if drafter in DRAFTERS]


@pytest.mark.parametrize(("drafter", "rule"), PAIRS)
@torch.inference_mode()
def test_a_round_stays_on_its_device_and_reads_no_number(drafter, rule, on_meta):
    target, drafters = on_meta
    sampling = RULES[rule].get("sampling", Sampling())
    rule = build_rule(RULES[rule].get("acceptance", "auto"), sampling)
    seed = torch.tensor(3, device=META)
    sampler = Sampler(build_transforms(sampling, None, target.vocab_size), rule, seed)
    drafter = drafters[drafter]
    num_drafted = 0 if drafter.max_drafted == 0 else 3
    rows, stopwatch = placed(target, drafter), Stopwatch(META)
    stopwatch.start()
    once = Drafting(rows, Plan(num_drafted), sampler)
    decode_round(target, drafter, rows, once, sampler, stopwatch)  # makes what is made once
    with OnlyThere():
        report = decode_round(target, drafter, rows, Drafting(rows, Plan(num_drafted), sampler), sampler, stopwatch)
    assert report.shape == (2, 8 + num_drafted + num_drafted + 1)


def test_every_drafter_is_tried():
    assert {drafter for drafter, _ in PAIRS} == set(DRAFTERS)


@pytest.mark.parametrize("mistake", [lambda x: x + torch.ones(3), lambda x: x + torch.ones(3).to(META)])
def test_the_check_notices_tensors_of_the_cpu(mistake):
    """Negative control."""
    with pytest.raises(AssertionError, match="cpu"), OnlyThere():
        mistake(torch.ones(3, device=META))
