"""What both the tapes on the CPU and the graphs on a GPU are tested with: every drafter, every rule, ragged rows."""

from __future__ import annotations

import torch
from layer_drafts import random_drafter

from selfspec import Sampling, build_drafter, wrap_target
from selfspec.cache import Paged
from selfspec.decoding.round import prefill
from selfspec.decoding.rows import Rows
from selfspec.decoding.sampler import Sampler
from selfspec.drafters import NoDraft
from selfspec.sampling import build_rule, build_transforms
from tiny_models import prompt_ids, tiny_llama

SAMPLED = dict(temperature=0.9, top_p=0.95, top_k=40)
RULES = {
    "greedy": dict(),
    "greedy, penalties": dict(
        sampling=Sampling(repetition_penalty=1.2, no_repeat_ngram_size=3, logit_bias={5: 1.0}, suppress_tokens=(7,))
    ),
    "rejection": dict(sampling=Sampling(**SAMPLED)),
    "coupled": dict(sampling=Sampling(temperature=0.9, min_p=0.02), acceptance="coupled"),
    "block": dict(sampling=Sampling(temperature=0.9), acceptance="block"),
    "typical": dict(sampling=Sampling(temperature=0.9), acceptance="typical"),
}
CACHES = {"contiguous": "contiguous", "paged": Paged(block_size=16)}
NEEDS_KNOWN_OUTPUT = ("greedy", "greedy, penalties", "coupled")  # what the synthetic drafter can be used with


def target_on(device, dtype=torch.float32):
    return wrap_target(tiny_llama(max_positions=1024, dtype=dtype).to(device))


def drafters_for(target):
    independent = wrap_target(
        tiny_llama(seed=5, num_layers=2, max_positions=1024, dtype=target.dtype).to(target.device)
    )
    found = {
        "none": NoDraft(),
        "early_exit": build_drafter("early_exit", target, exit_layer=2),
        "independent": build_drafter("independent", target, model=independent),
        "ngram": build_drafter("ngram", target),
        "synthetic": build_drafter("synthetic", target, accept_rate=0.7),
        "synthetic, with layers": build_drafter("synthetic", target, accept_rate=0.7, cost_layers=2),
    }
    if target.device.type == "meta":  # trained drafts are read from files, which need numbers
        return found
    return found | {
        "eagle3": random_drafter("eagle3", target, packed=False, d_vocab=40, feature_layers=(1, 2, 4)),
        "exit_adapter": random_drafter("exit_adapter", target, packed=False, exit_layer=2),
        "mtp": random_drafter("mtp", target, packed=False),
    }


DRAFTERS = ["none", "early_exit", "independent", "ngram", "synthetic", "synthetic, with layers"]
PAIRS = [
    (drafter, rule)
    for drafter in DRAFTERS
    for rule in RULES
    if rule in NEEDS_KNOWN_OUTPUT or not drafter.startswith("synthetic")
]
PAIRS += [(drafter, rule) for drafter in ("eagle3", "exit_adapter", "mtp") for rule in ("greedy", "rejection")]
RAGGED = [prompt_ids(length, seed=length) for length in (9, 1, 70, 2, 30, 9)]  # more than rows: they are refilled


def sampler_of(rule, target, seed=3):
    """The transforms and the rule of one of RULES."""
    sampling = RULES[rule].get("sampling", Sampling())
    acceptance = build_rule(RULES[rule].get("acceptance", "auto"), sampling)
    return Sampler(build_transforms(sampling, None, target.vocab_size), acceptance, seed)


def placed(target, drafter, rows=2, capacity=300):
    """Rows with prompts in them that have been run."""
    state = Rows(target, rows, capacity)
    state.set_eos([96])
    drafter.start(state)
    prompts = [prompt_ids(9 + row, seed=row) for row in range(rows)]
    if hasattr(drafter, "learn"):
        drafter.learn([ids + list(range(20)) for ids in prompts])
    for row, ids in enumerate(prompts):
        state.place(row, ids, 200, row)
        prefill(target, drafter, state, row, 0, len(ids) - 1)
    return state


def the_rounds(decoder):
    """The one set of captured rounds of a decoder."""
    (rounds,) = decoder.rows.rounds.values()
    return rounds


def told(outputs):
    """What must be the same however rounds are run."""
    return [
        (o.token_ids, o.finish_reason, [(r.num_drafted, r.num_accepted, r.num_emitted) for r in o.rounds])
        for o in outputs
    ]


def addresses(rows):
    """Of everything a graph may have baked in."""
    kept = [rows.tokens_BS, rows.lengths_B, rows.limits_B, rows.prompt_lens_B, rows.request_B, rows.active_B]
    kept += [rows.eos_E, rows.cache.storage, rows._steps_S]
    return [tensor.data_ptr() for tensor in kept]


class ReadsTheHost:
    """A drafter that no graph can hold."""

    name = "reads_the_host"
    max_drafted = None

    def __init__(self, drafter):
        self.drafter = drafter
        self.start, self.prefill = drafter.start, drafter.prefill

    def propose(self, rows, drafting):
        assert int(rows.lengths_B.max()) >= 0
        return self.drafter.propose(rows, drafting)


class RaisesAt:
    """Raises in one of its calls: the first two are the runs before a capture, the third is the capture."""

    name = "raises"
    max_drafted = None

    def __init__(self, drafter, call):
        self.drafter, self.call, self.calls = drafter, call, 0
        self.start, self.prefill = drafter.start, drafter.prefill

    def propose(self, rows, drafting):
        self.calls += 1
        draft = self.drafter.propose(rows, drafting)
        if self.calls == self.call:
            raise ZeroDivisionError(f"call {self.call}")
        return draft


def state_of(rows):
    """What counts of the rows, for before and after."""
    lengths = rows.lengths_B.tolist()
    committed = [rows.tokens_BS[row, : length + 1].tolist() for row, length in enumerate(lengths)]
    return lengths, committed, rows.active_B.tolist(), torch.cuda.current_stream() if rows.device.type == "cuda" else 0
