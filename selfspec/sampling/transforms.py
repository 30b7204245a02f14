"""Logits to the logits of p: one definition for target and draft, in the order of transformers' `generate`.

logit bias, repetition, presence and frequency penalties, no-repeat-ngram, suppressed tokens, the caller's own HF
processors; then, only when sampling (T > 0), temperature, top-k, top-p, min-p
(`transformers/generation/utils.py::_get_logits_processor`, 5.24). Impossible tokens are -inf in the result.

No host reads and fixed shapes for everything built in, so it can be captured in a CUDA graph; the caller's processors
are Python and run once per (row, position). Greedy without penalties is the identity and copies nothing. Bad numbers
(NaN, +inf, nothing left) pass through unchanged and are reported by the acceptance rule that meets them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from selfspec.errors import UserError
from selfspec.sampling import penalties, warpers
from selfspec.sampling.prefix import Prefix
from selfspec.sampling.settings import Sampling

__all__ = ["Prefix", "Processor", "Sampling", "Transforms", "build_transforms"]

Processor = Callable[[Tensor, Tensor], Tensor]  # (input_ids [1, len], scores [1, V]) -> scores [1, V], as in HF


class Transforms:
    """Apply the transforms of one run. `stateful`: a Prefix is needed; `identity`: nothing is asked for."""

    def __init__(self, sampling: Sampling, processors: Sequence[Processor] = (), vocab_size: int | None = None) -> None:
        self.sampling = sampling
        self.processors = tuple(processors)
        penalised = (
            sampling.repetition_penalty != 1
            or sampling.presence_penalty != 0
            or sampling.frequency_penalty != 0
            or sampling.no_repeat_ngram_size > 0
        )
        self.stateful = bool(penalised or self.processors)
        self.identity = (
            not self.stateful and not sampling.logit_bias and not sampling.suppress_tokens and sampling.greedy
        )
        self._per_device: dict[torch.device, tuple[Tensor | None, Tensor | None]] = {}
        if vocab_size is not None:
            _check_token_ids(sampling, vocab_size)

    def __call__(self, logits_BTV: Tensor, prefix: Prefix | None = None) -> Tensor:
        """logits [B, T, V] -> logits of p [B, T, V] in float32 (float64 stays); the input itself when identity.

        Raises UserError naming row and position when a caller's processor changes the shape.
        """
        if self.identity:
            return logits_BTV
        scores_BTV = logits_BTV if logits_BTV.dtype == torch.float64 else logits_BTV.float()
        scores_BTV = self._penalise(scores_BTV, prefix)
        return scores_BTV if self.sampling.greedy else self._warp(scores_BTV)

    def _penalise(self, scores_BTV: Tensor, prefix: Prefix | None) -> Tensor:
        s = self.sampling
        bias_V, suppressed_V = self._constants(scores_BTV)
        if bias_V is not None:
            scores_BTV = scores_BTV + bias_V
        if self.stateful:
            if prefix is None:
                raise UserError("These transforms depend on the tokens so far: pass the Prefix of every position.")
            stretches = prefix.stretches()
            if s.repetition_penalty != 1:
                scores_BTV = penalties.repetition(scores_BTV, stretches, s.repetition_penalty)
            if s.presence_penalty != 0 or s.frequency_penalty != 0:
                scores_BTV = penalties.presence_frequency(
                    scores_BTV, stretches, s.presence_penalty, s.frequency_penalty
                )
            if s.no_repeat_ngram_size > 0:
                scores_BTV = penalties.no_repeat_ngram(scores_BTV, stretches, s.no_repeat_ngram_size)
        if suppressed_V is not None:
            scores_BTV = scores_BTV.masked_fill(suppressed_V, -torch.inf)
        if self.processors and prefix is not None:
            scores_BTV = penalties.call_processors(self.processors, scores_BTV, prefix.stretches())
        return scores_BTV

    def _warp(self, scores_BTV: Tensor) -> Tensor:
        s = self.sampling
        if s.temperature != 1:
            scores_BTV = scores_BTV / s.temperature
        if s.top_k > 0:
            scores_BTV = warpers.top_k(scores_BTV, s.top_k)
        if s.top_p < 1:
            scores_BTV = warpers.top_p(scores_BTV, s.top_p)
        if s.min_p > 0:
            scores_BTV = warpers.min_p(scores_BTV, s.min_p)
        return scores_BTV

    def _constants(self, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Bias [V] and suppressed mask [V] on the device of the logits, made on the first call."""
        s = self.sampling
        if not s.logit_bias and not s.suppress_tokens:
            return None, None
        if like.device not in self._per_device:
            V = like.shape[-1]
            _check_token_ids(s, V)
            bias_V, suppressed_V = None, None
            if s.logit_bias:
                bias_V = torch.zeros(V)
                bias_V[list(s.logit_bias)] = torch.tensor([float(bias) for bias in s.logit_bias.values()])
                bias_V = bias_V.to(like.device)
            if s.suppress_tokens:
                suppressed_V = torch.zeros(V, dtype=torch.bool)
                suppressed_V[[token for token in s.suppress_tokens if token < V]] = True
                suppressed_V = suppressed_V.to(like.device)
            self._per_device[like.device] = (bias_V, suppressed_V)
        return self._per_device[like.device]


def build_transforms(
    sampling: Sampling, processors: Sequence[Processor] | None = None, vocab_size: int | None = None
) -> Transforms:
    """The transforms of one run. `processors` are HF LogitsProcessors (any callable of the same shape will do)."""
    if processors is not None and not isinstance(processors, Sequence):
        raise UserError(f"processors={processors!r} is not a list. Write [processor].")
    for processor in processors or ():
        if not callable(processor):
            raise UserError(
                f"processors holds {processor!r}, which cannot be called. Pass HF LogitsProcessors: objects called "
                "with input_ids [1, len] and scores [1, V] that return scores [1, V]."
            )
    return Transforms(sampling, tuple(processors or ()), vocab_size)


def _check_token_ids(sampling: Sampling, vocab_size: int) -> None:
    outside = [token for token in sampling.logit_bias or () if token >= vocab_size]
    if outside:
        raise UserError(f"logit_bias names tokens {outside}, but the vocabulary has {vocab_size}: use ids below that.")
