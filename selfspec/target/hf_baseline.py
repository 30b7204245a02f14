"""Plain `model.generate` on the same model: the baseline nobody can say was slowed down by this framework."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.streamers import BaseStreamer

from selfspec.errors import UserError
from selfspec.sampling import Sampling

if TYPE_CHECKING:
    from selfspec.target.stack import Target


@dataclass(frozen=True)
class HFOutput:
    """Generated ids, seconds to the first of them, seconds in all."""

    token_ids: list[int]
    ttft_s: float
    total_s: float


class _FirstToken(BaseStreamer):
    """Notes when the first generated token arrives (the first `put` is the prompt)."""

    def __init__(self) -> None:
        self.puts = 0
        self.at_s: float | None = None

    def put(self, value: object) -> None:
        self.puts += 1
        if self.puts == 2:
            self.at_s = time.perf_counter()

    def end(self) -> None:
        pass


def hf_generate(
    target: Target,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    eos_token_ids: Sequence[int] = (),
    seed: int = 0,
) -> HFOutput:
    """`target.hf_model.generate` with the same settings. UserError for settings that `generate` does not have.

    An empty `eos_token_ids` means: run to `max_new_tokens`.
    """
    options = _generate_options(sampling)
    input_ids = torch.tensor([list(prompt_ids)], device=target.device)
    first = _FirstToken()
    pad = eos_token_ids[0] if eos_token_ids else 0
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(seed)
        _synchronize(target)
        start_s = time.perf_counter()
        out = target.hf_model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_new_tokens,
            eos_token_id=list(eos_token_ids) or None,
            pad_token_id=pad,
            streamer=first,
            **options,
        )
        _synchronize(target)
        total_s = time.perf_counter() - start_s
    ttft_s = (first.at_s or start_s + total_s) - start_s
    return HFOutput(out[0, len(prompt_ids) :].tolist(), ttft_s, total_s)


def _generate_options(sampling: Sampling) -> dict[str, Any]:
    if sampling.presence_penalty or sampling.frequency_penalty:
        raise UserError(
            "presence_penalty and frequency_penalty do not exist in transformers' generate: no HF baseline."
        )
    options: dict[str, Any] = {"do_sample": not sampling.greedy, "repetition_penalty": sampling.repetition_penalty}
    options["no_repeat_ngram_size"] = sampling.no_repeat_ngram_size
    options["suppress_tokens"] = list(sampling.suppress_tokens) or None
    if sampling.logit_bias:
        options["sequence_bias"] = {(token,): float(bias) for token, bias in sampling.logit_bias.items()}
    if not sampling.greedy:
        options |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        options["min_p"] = sampling.min_p or None
    else:  # a checkpoint's own sampling defaults would only draw a warning
        options |= {"temperature": None, "top_p": None, "top_k": None}
    return options


def _synchronize(target: Target) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
