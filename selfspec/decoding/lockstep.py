"""Processors, criteria and streamers written for transformers' loop, shown what that loop would show them.

transformers decodes a padded batch in lockstep, one token of every row per step; here rows commit several tokens at a
time and at different speeds. `PaddedProcessors` calls logits processors on the padded prefix of each drafted position.
`Replay` takes the committed tokens through HF's loop again, so criteria and streamers see the same batches in the same
order and end rows at the same token. Hooks get plain tensors (they may keep them), never inference tensors.

Cost: per position and processor one call on the host; per token one call of the criteria, as in transformers.
Shape letters: B rows, T positions or padded tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from selfspec.decoding.rows import Rows
from selfspec.decoding.sampler import Sampler
from selfspec.errors import UserError
from selfspec.sampling import Prefix, Sampling, build_transforms

Processor = Callable[[Tensor, Tensor], Tensor]  # ids [B, T], scores [B, V] -> scores [B, V]


class PaddedProcessors:
    """HF's processors, called as `generate` calls them, then the warpers of `Sampling`.

    A processor may tell rows apart by their index. Rows of different lengths do not fit into one call, so each call
    shows one row's prefix in every row, and only that row of the result counts.
    """

    def __init__(self, processors: Sequence[Processor], sampling: Sampling, padding: Sequence[Tensor]) -> None:
        self.processors = tuple(processors)
        self.padding = tuple(padding)  # per row, the ids in front of its prompt
        self.warp = build_transforms(sampling)
        self.stateful = bool(processors)

    def __call__(self, logits_BTV: Tensor, prefix: Prefix | None = None) -> Tensor:
        return self.warp(logits_BTV if prefix is None else self._process(logits_BTV, prefix))

    @torch.inference_mode(False)
    @torch.no_grad()
    def _process(self, logits_BTV: Tensor, prefix: Prefix) -> Tensor:
        scores_BTV = logits_BTV.to(torch.float32, copy=True)
        for row, ends in enumerate(prefix.ends_BT.tolist()):
            for step, end in enumerate(ends):
                if end <= 0:  # an idle row
                    break
                ids_T = prefix.tokens_BS[row, :end].to(self.padding[row].device)
                scores_BTV[row, step] = self._call(torch.cat([self.padding[row], ids_T]), scores_BTV[row, step], row)
                follower = prefix.tokens_BS[row, end : end + 1]
                if step + 1 < len(ends) and scores_BTV[row, step, follower].item() == -torch.inf:
                    break  # this draft will be rejected: no processor may see a prefix that cannot come to be
        return scores_BTV

    def _call(self, ids_T: Tensor, scores_V: Tensor, row: int) -> Tensor:
        shape = (len(self.padding), len(scores_V))
        ids_BT = ids_T.repeat(shape[0], 1)
        scores_BV = scores_V.to(ids_T.device).repeat(shape[0], 1)
        for processor in self.processors:
            scores_BV = processor(ids_BT, scores_BV)
            if not isinstance(scores_BV, Tensor) or scores_BV.shape != shape:
                got = tuple(scores_BV.shape) if isinstance(scores_BV, Tensor) else type(scores_BV).__name__
                raise UserError(
                    f"row {row}, position {len(ids_T)}: {type(processor).__name__} returned {got}; a processor must "
                    f"return scores of the shape it was given, {shape}."
                )
        return scores_BV[row]


@dataclass(frozen=True)
class RecordingSampler(Sampler):
    """A sampler that keeps, for a single row, the raw and the transformed logits `[1, V]` of every committed token."""

    keep_logits: bool = False
    keep_scores: bool = False
    logits: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)

    def transform(self, rows: Rows, logits_BTV: Tensor) -> Tensor:
        scores_BTV = super().transform(rows, logits_BTV)
        if self.keep_logits:
            self.logits.extend(logits_BTV.to(torch.float32, copy=True).unbind(1))
        if self.keep_scores:
            self.scores.extend(scores_BTV.to(torch.float32, copy=True).unbind(1))
        return scores_BTV

    def forget(self, num_committed: int) -> None:
        """Drop what belongs to rejected drafts."""
        del self.logits[num_committed:], self.scores[num_committed:]


class Replay:
    """HF's loop over tokens that are known already. A step is taken once every unfinished row has its next token."""

    def __init__(
        self,
        input_ids: Tensor,
        criteria: Callable[[Tensor, tuple[Tensor, ...] | None], Tensor],
        pad: int | None,
        streamer: Any | None,
        sampler: RecordingSampler,
    ) -> None:
        """pad: what finished rows are filled with. None: as in HF, they go on with their own tokens until all end."""
        self.sequences = input_ids  # [B, T], grows by one column per step
        self.num_prompt_tokens = input_ids.shape[1]
        self.criteria = criteria
        self.pad = pad
        self.streamer = streamer
        self.sampler = sampler
        self.tokens: list[list[int]] = [[] for _ in input_ids]
        self.unfinished_B = torch.ones(len(input_ids), dtype=torch.int64, device=input_ids.device)
        self.unfinished = [True] * len(input_ids)  # the same on the host

    @torch.inference_mode(False)
    @torch.no_grad()
    def cut(self, request: int, token_ids: list[int], num_checked: int) -> int | None:
        """Take in what a row has committed and replay what can be; end the row when HF would have ended it."""
        self.tokens[request] = list(token_ids)
        self.sampler.forget(len(token_ids))
        while any(self.unfinished) and all(self._has_next(row) for row in range(len(self.tokens))):
            self._step()
        return None if any(self.unfinished) and self._goes_on(request) else len(token_ids)

    def text(self, token_ids: list[int], stopped: bool) -> str:
        return ""

    def recorded(self, per_token: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What the sampler kept for the tokens of the result, as plain tensors where the result is."""
        num_tokens = self.sequences.shape[1] - self.num_prompt_tokens
        return tuple(tensor.clone().to(self.sequences.device) for tensor in per_token[:num_tokens])

    def _goes_on(self, row: int) -> bool:
        return self.unfinished[row] or self.pad is None

    def _has_next(self, row: int) -> bool:
        return not self._goes_on(row) or self.num_prompt_tokens + len(self.tokens[row]) > self.sequences.shape[1]

    def _step(self) -> None:
        step = self.sequences.shape[1] - self.num_prompt_tokens
        next_ids = [ids[step] if self._goes_on(row) else self.pad for row, ids in enumerate(self.tokens)]
        next_B = torch.tensor(next_ids, dtype=self.sequences.dtype, device=self.sequences.device)
        self.sequences = torch.cat([self.sequences, next_B[:, None]], dim=-1)
        scores = tuple(self.sampler.scores[: step + 1]) if self.sampler.keep_scores else None
        self.unfinished_B = self.unfinished_B & ~self.criteria(self.sequences, scores)
        self.unfinished = [bool(unfinished) for unfinished in self.unfinished_B.tolist()]
        if self.streamer is not None:
            self.streamer.put(next_B.cpu())
