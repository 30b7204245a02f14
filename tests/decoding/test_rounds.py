"""What a captured round relies on, checked on the CPU: fixed shapes and addresses, no host reads, results read a round
late. The graphs themselves are checked by tests/gpu, where there is a GPU.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from head_drafts import random_heads
from layer_drafts import random_drafter
from torch.utils._python_dispatch import TorchDispatchMode

from selfspec import Sampling, UserError, build_drafter, decode, wrap_target
from selfspec.decoding import graphs, loop
from selfspec.decoding.drafting import Drafting
from selfspec.decoding.round import decode_round, prefill
from selfspec.decoding.rows import Rows
from selfspec.decoding.sampler import Sampler
from selfspec.decoding.stopwatch import Stopwatch
from selfspec.drafters import NoDraft
from selfspec.drafters.hydra import Hydra
from selfspec.drafters.medusa import Medusa
from selfspec.lookahead import Plan
from selfspec.sampling import build_rule, build_transforms
from tiny_models import prompt_ids, tiny_llama

TARGET = wrap_target(tiny_llama())
DRAFTERS = {
    "none": NoDraft(),
    "early_exit": build_drafter("early_exit", TARGET, exit_layer=2),
    "layer_skip": build_drafter("layer_skip", TARGET, skip_attention=[2], skip_mlp=[1, 2]),
    "independent": build_drafter("independent", TARGET, model=wrap_target(tiny_llama(seed=5, num_layers=2))),
    "ngram": build_drafter("ngram", TARGET),
    "medusa": Medusa(TARGET, *random_heads("medusa", TARGET, d_vocab=40)),
    "hydra": Hydra(TARGET, *random_heads("hydra", TARGET)),
    "hydra, prefix": Hydra(TARGET, *random_heads("hydra", TARGET, prefix=True)),
    "eagle3": random_drafter("eagle3", TARGET, d_vocab=40, feature_layers=(1, 2, 4)),
    "exit_adapter": random_drafter("exit_adapter", TARGET, exit_layer=2),
    "mtp": random_drafter("mtp", TARGET, d_vocab=40),
}
HOST_READS = {
    "aten._local_scalar_dense.default",
    "aten.nonzero.default",
    "aten.is_nonzero.default",
    "aten.equal.default",
}


class Recorder(TorchDispatchMode):
    """Every operator with the shapes it returns, and the operators that read the host."""

    def __init__(self):
        super().__init__()
        self.calls, self.host_reads = [], Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((str(func), tuple(out.shape) if isinstance(out, torch.Tensor) else None))
        if str(func) in HOST_READS:
            self.host_reads[str(func)] += 1
        return out


@pytest.fixture
def reads(monkeypatch):
    """Counts the ways in which Python reads a tensor, which no dispatch mode sees in inference mode.

    `numpy()` is not among them: on the CPU, and only there, top-p sorts with numpy's faster sort.
    """
    count = Counter()
    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__"):
        original = getattr(torch.Tensor, name)

        def counted(self, *args, _name=name, _original=original, **kwargs):
            count[_name] += 1
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    return count


def placed(drafter, rows=2, capacity=200):
    state = Rows(TARGET, rows, capacity)
    state.set_eos([96])
    drafter.start(state)
    for row in range(rows):
        ids = prompt_ids(9 + row, seed=row)
        state.place(row, ids, 100, row)
        prefill(TARGET, drafter, state, row, 0, len(ids) - 1)
    return state


def sampler_of(sampling, acceptance="auto"):
    return Sampler(build_transforms(sampling, None, TARGET.vocab_size), build_rule(acceptance, sampling), seed=3)


SAMPLERS = {
    "greedy": sampler_of(Sampling()),
    "greedy, penalties": sampler_of(Sampling(repetition_penalty=1.2, no_repeat_ngram_size=3)),
    "rejection": sampler_of(Sampling(temperature=0.8, top_p=0.9, top_k=20)),
    "coupled": sampler_of(Sampling(temperature=0.8, min_p=0.05), "coupled"),
    "block": sampler_of(Sampling(temperature=0.8), "block"),
}


@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
@pytest.mark.parametrize("drafter", sorted(DRAFTERS))
@torch.inference_mode()
def test_a_round_reads_nothing_on_the_host_and_repeats_the_same_shapes_at_the_same_addresses(drafter, sampler, reads):
    drafter, sampler = DRAFTERS[drafter], SAMPLERS[sampler]
    rows, stopwatch = placed(drafter), Stopwatch(TARGET.device)
    num_drafted = 0 if drafter.max_drafted == 0 else 3
    stopwatch.start()
    once = Drafting(rows, Plan(num_drafted), sampler)
    decode_round(TARGET, drafter, rows, once, sampler, stopwatch)  # makes what is made once
    recorded, addresses = [], []
    reads.clear()
    for _ in range(2):
        with Recorder() as recorder:
            decode_round(TARGET, drafter, rows, Drafting(rows, Plan(num_drafted), sampler), sampler, stopwatch)
        recorded.append(recorder)
        kept = (rows.tokens_BS, rows.lengths_B, rows.active_B, rows.limits_B, rows.eos_E, rows.cache.storage)
        addresses.append([tensor.data_ptr() for tensor in kept])
    assert not recorded[0].host_reads and not reads
    assert recorded[0].calls == recorded[1].calls, "same operators, same shapes"
    assert addresses[0] == addresses[1]


@pytest.mark.parametrize("drafter", sorted(DRAFTERS))
def test_the_loop_reads_the_device_once_per_round(drafter, reads):
    prompts = [prompt_ids(9), prompt_ids(5)]
    options = dict(max_new_tokens=24, lookahead=3, ignore_eos=True, max_batch_rows=2)
    reads.clear()
    outputs = decode(TARGET, DRAFTERS[drafter], prompts, **options)
    each = 2 if drafter == "ngram" else 1  # on the CPU, where it may look, it cuts its draft to what it copied
    assert reads == {"tolist": each * max(len(output.rounds) for output in outputs)}


@torch.inference_mode()
def test_the_counters_notice_host_reads(reads):
    """Negative control."""
    with Recorder() as recorder:
        torch.ones(3).nonzero()
    total = torch.ones(3).sum()
    assert total.item() and bool(total) and int(total) and float(total)
    assert recorder.host_reads.total() == 1
    assert all(reads[name] for name in ("item", "__bool__", "__int__", "__float__"))


@dataclass
class LateRounds(graphs.EagerRounds):
    """The loop's twin of a captured round: its report is read one round late."""

    lag: int = 1

    def __call__(self, plan, stopwatch):
        drafting = Drafting(self.rows, plan, self.sampler)
        report = decode_round(self.rows.target, self.drafter, self.rows, drafting, self.sampler, stopwatch).clone()
        return report.tolist


@pytest.mark.parametrize("max_batch_rows", [1, 2, 5])
@pytest.mark.parametrize("drafter", sorted(DRAFTERS))
def test_reading_results_a_round_late_changes_no_token(drafter, max_batch_rows, monkeypatch):
    prompts = [prompt_ids(length, seed=length) for length in (9, 1, 70, 2, 9)]
    for options in (
        dict(max_new_tokens=24, lookahead=3),
        dict(max_new_tokens=1, lookahead=3, ignore_eos=True),
        dict(max_new_tokens=17, lookahead=2, sampling=Sampling(temperature=0.9), acceptance="coupled", ignore_eos=True),
    ):
        expected = decode(TARGET, DRAFTERS[drafter], prompts, **options, max_batch_rows=max_batch_rows)
        with monkeypatch.context() as patch:
            patch.setattr(loop, "choose_rounds", lambda drafter, rows, sampler, *_: LateRounds(drafter, rows, sampler))
            late = decode(TARGET, DRAFTERS[drafter], prompts, **options, max_batch_rows=max_batch_rows)
        assert [o.token_ids for o in late] == [o.token_ids for o in expected]
        assert [o.finish_reason for o in late] == [o.finish_reason for o in expected]
        assert [len(o.rounds) for o in late] == [len(o.rounds) for o in expected]


@pytest.mark.parametrize("drafter", sorted(DRAFTERS))
@torch.inference_mode()
def test_a_round_of_idle_rows_changes_nothing_that_counts(drafter):
    """Warm-up and capture run like this, between two rounds of a request."""
    drafter, sampler = DRAFTERS[drafter], SAMPLERS["greedy"]
    num_drafted = 0 if drafter.max_drafted == 0 else 3
    rows, stopwatch = placed(drafter), Stopwatch(TARGET.device)
    stopwatch.start()
    tokens = []
    for interrupted in (False, True):
        rows = placed(drafter)
        for _ in range(6):
            decode_round(TARGET, drafter, rows, Drafting(rows, Plan(num_drafted), sampler), sampler, stopwatch)
            if interrupted:
                before = rows.lengths_B.clone()
                with pytest.raises(RuntimeError), rows.idle(192):
                    decode_round(TARGET, drafter, rows, Drafting(rows, Plan(num_drafted), sampler), sampler, stopwatch)
                    raise RuntimeError("capture failed")
                assert torch.equal(before, rows.lengths_B) and rows.active_B.all()
        tokens.append([rows.tokens_BS[row, : int(rows.lengths_B[row]) + 1].tolist() for row in range(2)])
    assert tokens[0] == tokens[1]


def test_graphs_are_refused_where_they_cannot_be():
    rows = Rows(TARGET, 1, 64)
    with pytest.raises(UserError, match="needs a CUDA device"):
        graphs.choose_rounds(NoDraft(), rows, SAMPLERS["greedy"], "whole")
    with pytest.raises(UserError, match=r"rounds='fast' is unknown.*whole"):
        graphs.choose_rounds(NoDraft(), rows, SAMPLERS["greedy"], "fast")
