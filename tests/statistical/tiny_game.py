"""A model with eight tokens, small enough to enumerate: what every sampled sequence should be distributed as.

The reference owes nothing to the decoder or to `selfspec.sampling`: logits come from transformers' own forward without
a cache, one full sequence per prefix; the transforms are transformers' processors (and five lines for presence and
frequency penalties, which transformers lacks), called on each prefix by itself; probabilities are float64.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from chi_square import Tokens
from transformers.generation import logits_process as hf

from selfspec import Decoder, Output, Sampling, Target, build_drafter, wrap_target
from selfspec.drafters import Drafter
from tiny_models import tiny_llama

V, DEPTH, EXIT, TEMPERATURE = 8, 3, 1, 1.5
# The second visit of 3 lets n-grams repeat, and prompt lookup draft. One token: nothing to prefill, hence fast, and the
# independent draft starts at position 0, where the token before the pending one does not exist.
PROMPTS = {"early_exit": [3, 4, 3], "reduced": [3, 4, 3], "ngram": [3, 4, 3], "independent": [4], "none": [3, 4, 3]}
DRAFTERS = ("early_exit", "independent", "ngram")
REDUCED = [2, 0, 1, 3, 4]  # EOS, then the first ids: what an early exit with d_vocab=5 may draft
ROWS = 1024


class PresenceFrequency(hf.LogitsProcessor):
    """OpenAI's penalties, over the generated tokens of one sequence."""

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self.presence, self.frequency, self.prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for token in input_ids[0, self.prompt_length :].tolist():
            scores[0, token] -= self.frequency
        for token in set(input_ids[0, self.prompt_length :].tolist()):
            scores[0, token] -= self.presence
        return scores


class Favourite(hf.LogitsProcessor):
    """A caller's own processor that depends on the whole prefix: raises one token, forbids another."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        digest = sum((place + 1) * token for place, token in enumerate(input_ids[0].tolist()))
        scores = scores.clone()
        scores[0, digest % V] += 2.0
        scores[0, (digest + 3) % V] = -math.inf
        return scores


@dataclass(frozen=True)
class Case:
    """Transforms as the decoder is asked for them, and as transformers' processors (given the prompt's length)."""

    settings: dict[str, Any]
    reference: Callable[[int], list[hf.LogitsProcessor]]
    processors: tuple[hf.LogitsProcessor, ...] = field(default=())

    @property
    def sampling(self) -> Sampling:
        return Sampling(**{"temperature": TEMPERATURE, **self.settings})


def _case(reference: Sequence[hf.LogitsProcessor] = (), **settings: Any) -> Case:
    return Case(settings, lambda _length: [*reference, hf.TemperatureLogitsWarper(TEMPERATURE)])


def _warped(warper: hf.LogitsProcessor, **settings: Any) -> Case:
    return Case(settings, lambda _length: [hf.TemperatureLogitsWarper(TEMPERATURE), warper])


def _counted(presence: float, frequency: float, **settings: Any) -> Case:
    return Case(
        settings,
        lambda length: [PresenceFrequency(presence, frequency, length), hf.TemperatureLogitsWarper(TEMPERATURE)],
    )


CASES = {
    "temperature": _case(),
    "top_k": _warped(hf.TopKLogitsWarper(3), top_k=3),
    "top_p": _warped(hf.TopPLogitsWarper(0.8), top_p=0.8),
    "min_p": _warped(hf.MinPLogitsWarper(0.15), min_p=0.15),
    "repetition": _case([hf.RepetitionPenaltyLogitsProcessor(1.6)], repetition_penalty=1.6),
    "presence": _counted(1.5, 0.0, presence_penalty=1.5),
    "frequency": _counted(0.0, 1.2, frequency_penalty=1.2),
    "no_repeat_ngram": _case([hf.NoRepeatNGramLogitsProcessor(2)], no_repeat_ngram_size=2),
    "logit_bias": _case(
        [hf.SequenceBiasLogitsProcessor({(4,): -2.0, (6,): 1.0, (1,): -math.inf})],
        logit_bias={4: -2.0, 6: 1.0, 1: -math.inf},
    ),
    "suppressed": _case([hf.SuppressTokensLogitsProcessor((5, 2))], suppress_tokens=(5, 2)),
    "custom": Case(
        dict(top_p=0.95),
        lambda _length: [Favourite(), hf.TemperatureLogitsWarper(TEMPERATURE), hf.TopPLogitsWarper(0.95)],
        (Favourite(),),
    ),
    "everything": Case(
        dict(
            top_k=5, top_p=0.95, min_p=0.02, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3,
            no_repeat_ngram_size=3, logit_bias={6: 1.0}, suppress_tokens=(0,),
        ),
        lambda length: [
            hf.SequenceBiasLogitsProcessor({(6,): 1.0}),
            hf.RepetitionPenaltyLogitsProcessor(1.3),
            PresenceFrequency(0.5, 0.3, length),
            hf.NoRepeatNGramLogitsProcessor(3),
            hf.SuppressTokensLogitsProcessor((0,)),
            hf.TemperatureLogitsWarper(TEMPERATURE),
            hf.TopKLogitsWarper(5),
            hf.TopPLogitsWarper(0.95),
            hf.MinPLogitsWarper(0.02),
        ],
    ),
}  # fmt: skip


@functools.cache
def target() -> Target:
    return wrap_target(_tiny(seed=3, num_layers=3))


@functools.cache
def draft_model() -> Target:
    return wrap_target(_tiny(seed=5, num_layers=1))


def _tiny(seed: int, num_layers: int) -> Any:
    return tiny_llama(vocab_size=V, hidden_size=16, num_heads=2, num_kv_heads=1, seed=seed, num_layers=num_layers)


@functools.cache
def exit_model() -> Any:
    """The target cut off behind layer EXIT, as a transformers model of its own: what the early exit's q comes from."""
    model = copy.deepcopy(target().hf_model)
    model.model.layers = model.model.layers[:EXIT]
    model.config.num_hidden_layers = EXIT
    return model


def new_drafter(name: str) -> Drafter | None:
    kind, options = {
        "early_exit": ("early_exit", {"exit_layer": EXIT}),
        "reduced": ("early_exit", {"exit_layer": EXIT, "d_vocab": len(REDUCED)}),
        "independent": ("independent", {"model": draft_model()}),
    }.get(name, (name, {}))
    return None if kind == "none" else build_drafter(kind, target(), **options)


@functools.cache
def _decoder(drafter: str) -> Decoder:
    return Decoder(target(), new_drafter(drafter), max_batch_rows=ROWS)


def sample(
    drafter: str, case: str, count: int, *, prompt: Sequence[int] | None = None, **options: Any
) -> tuple[list[Tokens], list[Output]]:
    """`count` outputs of DEPTH tokens from one prompt, ROWS at a time: rows are refilled as they finish."""
    options = {"max_new_tokens": DEPTH, "ignore_eos": True, "reuse": True, **options}
    transforms = dict(sampling=CASES[case].sampling, processors=CASES[case].processors)
    outputs = _decoder(drafter).decode([prompt or PROMPTS[drafter]] * count, **transforms, **options)
    return [tuple(output.token_ids) for output in outputs], outputs


@functools.cache
def exact_p(drafter: str, case: str) -> dict[Tokens, np.ndarray]:
    """The target's conditional distribution `[V]` behind every sequence of up to DEPTH − 1 generated tokens."""
    return _conditionals(target().hf_model, tuple(PROMPTS[drafter]), case)


@functools.cache
def exact_q(drafter: str, case: str) -> dict[Tokens, np.ndarray]:
    """The same of the draft: what a drafted token is drawn from behind each prefix."""
    model = draft_model().hf_model if drafter == "independent" else exit_model()
    allowed = REDUCED if drafter == "reduced" else range(V)
    return _conditionals(model, tuple(PROMPTS[drafter]), case, allowed)


def alpha(drafter: str, case: str, prefix: Tokens) -> float:
    """Σ_v min(p, q) = 1 − TV(p, q) behind `prefix`."""
    return float(np.minimum(exact_p(drafter, case)[prefix], exact_q(drafter, case)[prefix]).sum())


def _conditionals(model: Any, prompt: Tokens, case: str, allowed: Sequence[int] = range(V)) -> dict[Tokens, np.ndarray]:
    processors = CASES[case].reference(len(prompt))
    exact: dict[Tokens, np.ndarray] = {}
    for depth in range(DEPTH):
        prefixes = list(itertools.product(range(V), repeat=depth))
        ids = torch.tensor([(*prompt, *prefix) for prefix in prefixes])
        with torch.inference_mode():
            logits_BV = model(ids, use_cache=False).logits[:, -1].float()
            logits_BV[:, [token for token in range(V) if token not in allowed]] = -torch.inf
            for prefix, ids_S, logits_V in zip(prefixes, ids, logits_BV, strict=True):
                scores_1V = logits_V[None].clone()
                for processor in processors:
                    scores_1V = processor(ids_S[None], scores_1V)
                exact[prefix] = torch.softmax(scores_1V[0].double(), -1).numpy()
    return exact
