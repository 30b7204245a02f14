"""Every drafter that grows trees, for one tiny target: what tests of trees have in common."""

from __future__ import annotations

import functools

from head_drafts import random_heads
from layer_drafts import random_drafter

from selfspec import Sampling, build_drafter, wrap_target
from selfspec.drafters.hydra import Hydra
from selfspec.drafters.medusa import Medusa
from tiny_models import prompt_ids, tiny_llama

TARGET = wrap_target(tiny_llama())
PROMPTS = [prompt_ids(length, seed=length) for length in (1, 9, 70, 5)]
DRAFTERS = (
    "early_exit",
    "layer_skip",
    "independent",
    "independent_equal",
    "exit_adapter",
    "eagle3",
    "mtp",
    "medusa",
    "hydra",
)
COUPLED = dict(sampling=Sampling(temperature=0.9, top_p=0.95), acceptance="coupled", seed=7)
PENALISED = dict(
    sampling=Sampling(temperature=0.9, repetition_penalty=1.4, frequency_penalty=0.3), acceptance="coupled", seed=7
)


@functools.cache
def drafter_of(name):
    if name == "early_exit":
        return build_drafter("early_exit", TARGET, exit_layer=2)
    if name == "layer_skip":
        return build_drafter("layer_skip", TARGET, skip_attention=[2], skip_mlp=[1])
    if name.startswith("independent"):
        model = TARGET if name == "independent_equal" else wrap_target(tiny_llama(seed=5, num_layers=2))
        return build_drafter("independent", TARGET, model=model)
    if name in ("medusa", "hydra"):
        return {"medusa": Medusa, "hydra": Hydra}[name](TARGET, *random_heads(name, TARGET))
    options = {"exit_layer": 2} if name == "exit_adapter" else {}
    return random_drafter(name, TARGET, **options)
