"""One small model, `generate` on it as it is and with the bridge, and hooks that remember what they were shown."""

from __future__ import annotations

import functools

import torch
from transformers import LogitsProcessor, StoppingCriteria

import selfspec
from selfspec import build_drafter, wrap_target
from tiny_models import prompt_ids, tiny_llama

VOCAB = 256
PROMPT = torch.tensor([prompt_ids(6, vocab_size=VOCAB)])
NEW = 24


@functools.cache
def model():
    """A byte-level model whose greedy text is varied."""
    return tiny_llama(vocab_size=VOCAB, seed=1)


@functools.cache
def drafters():
    target = wrap_target(model())
    return {
        "none": None,
        "name": "ngram",
        "mapping": {"kind": "early_exit", "exit_layer": 2},
        "first_layer": build_drafter("early_exit", target, exit_layer=1),
        "always_right": build_drafter("independent", target, model=target),
        "other_model": build_drafter("independent", target, model=wrap_target(tiny_llama(vocab_size=VOCAB, seed=5))),
    }


def plain(ids=PROMPT, **options):
    return model().generate(ids, **{"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0} | options)


def ours(ids=PROMPT, drafter="always_right", **options):
    chosen = drafters().get(drafter, drafter) if isinstance(drafter, str) else drafter
    return plain(ids, custom_generate=selfspec.hf_generate, drafter=chosen, **options)


@functools.cache
def free_run():
    return plain()[0, PROMPT.shape[1] :].tolist()


@functools.cache
def left_padded():
    """Three prompts of different lengths, padded on the left with an id that also is an ordinary token."""
    prompts = [prompt_ids(length, seed=length, vocab_size=VOCAB) for length in (9, 2, 5)]
    ids = torch.tensor([[7] * (9 - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (9 - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"ids": ids, "attention_mask": mask}


class ParityOfPrefix(LogitsProcessor):
    """Forbids even or odd tokens, by the sum of everything so far (padding counts, as in generate)."""

    def __call__(self, input_ids, scores):
        tokens = torch.arange(scores.shape[1]) % 2
        return scores.masked_fill(tokens == input_ids.sum(1, keepdim=True) % 2, -torch.inf)


class Seen(StoppingCriteria):
    """Remembers what it is shown, and never or sometimes ends a row."""

    def __init__(self, stop=lambda ids: torch.zeros(len(ids), dtype=torch.bool)):
        self.stop, self.seen = stop, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append((input_ids.tolist(), scores is None or len(scores)))
        return self.stop(input_ids)


class Puts:
    def __init__(self):
        self.events = []

    def put(self, value):
        self.events.append((value.tolist(), value.device.type, value.dtype))

    def end(self):
        self.events.append("end")
