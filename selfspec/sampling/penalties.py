"""Transforms that depend on the tokens so far, each evaluated at every position on that position's own prefix.

repetition and no-repeat-ngram are transformers' (`RepetitionPenaltyLogitsProcessor`, `NoRepeatNGramLogitsProcessor`;
both count the prompt). presence and frequency are OpenAI's: logit -= frequency * count + presence * [count > 0], over
generated tokens only. Nothing is remembered between calls: speculation that is rejected leaves no trace.
Cost: one scatter of the B*T*S visible tokens and a few passes over [B, T, V]; n-grams compare n * B*T*S tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from selfspec.errors import UserError
from selfspec.sampling.prefix import Stretches


def repetition(scores_BTV: Tensor, stretches: Stretches, penalty: float) -> Tensor:
    """Divide positive logits of seen tokens by `penalty`, multiply negative ones."""
    ids_BTS = stretches.ids_BTS(stretches.starts_B1, scores_BTV.shape[-1])
    seen_BTV = _marked(scores_BTV, ids_BTS)
    penalised_BTV = torch.where(scores_BTV < 0, scores_BTV * penalty, scores_BTV / penalty)
    return torch.where(seen_BTV, penalised_BTV, scores_BTV)


def presence_frequency(scores_BTV: Tensor, stretches: Stretches, presence: float, frequency: float) -> Tensor:
    """Lower the logit of every generated token by `presence` once and by `frequency` per occurrence."""
    B, T, V = scores_BTV.shape
    ids_BTS = stretches.ids_BTS(stretches.generated_B1, V)
    counts_BTV = scores_BTV.new_zeros((B, T, V + 1))
    counts_BTV.scatter_add_(-1, ids_BTS, torch.ones_like(ids_BTS, dtype=counts_BTV.dtype))
    counts_BTV = counts_BTV[..., :V]
    return scores_BTV - (frequency * counts_BTV + presence * (counts_BTV > 0))


def no_repeat_ngram(scores_BTV: Tensor, stretches: Stretches, n: int) -> Tensor:
    """Forbid every token that would complete an n-gram already present."""
    tokens_BXS, ends_BT1 = stretches.tokens_BXS, stretches.ends_BT[..., None]
    S, V = tokens_BXS.shape[-1], scores_BTV.shape[-1]
    if n > S:
        return scores_BTV
    B, T = stretches.ends_BT.shape
    tokens_BTS = tokens_BXS.expand(B, T, S)
    # window w covers slots [w, w + n): its first n - 1 tokens must equal the last n - 1 of the prefix
    windows_W = torch.arange(S - n + 1, device=scores_BTV.device)
    match_BTW = (windows_W >= stretches.starts_B1[..., None]) & (windows_W + n <= ends_BT1)
    for offset in range(n - 1):
        suffix_BT1 = tokens_BTS.gather(-1, (ends_BT1 - (n - 1) + offset).clamp(0, S - 1))
        match_BTW = match_BTW & (tokens_BTS[..., offset : offset + S - n + 1] == suffix_BT1)
    completions_BTW = tokens_BTS[..., n - 1 :].clamp(max=V)
    return scores_BTV.masked_fill(_marked(scores_BTV, torch.where(match_BTW, completions_BTW, V)), -torch.inf)


def call_processors(
    processors: Sequence[Callable[[Tensor, Tensor], Tensor]], scores_BTV: Tensor, stretches: Stretches
) -> Tensor:
    """Call the caller's processors once per (row, position), as `generate` would. Reads the host."""
    B, T, V = scores_BTV.shape
    tokens_BTS = stretches.tokens_BXS.expand(B, T, -1)
    starts, ends = stretches.starts_B1[:, 0].tolist(), stretches.ends_BT.tolist()
    result_BTV = scores_BTV.clone()
    for b in range(B):
        for t in range(T):
            if ends[b][t] <= starts[b]:
                continue
            input_ids = tokens_BTS[b, t, starts[b] : ends[b][t]][None].clone()
            scores = scores_BTV[b, t][None].clone()
            for processor in processors:
                scores = processor(input_ids, scores)
                if not isinstance(scores, Tensor) or scores.shape != (1, V):
                    got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
                    raise UserError(
                        f"row {b}, position {ends[b][t] - starts[b]}: {type(processor).__name__} returned {got}; a "
                        f"processor must return scores of the shape it was given, (1, {V})."
                    )
            result_BTV[b, t] = scores[0]
    return result_BTV


def _marked(scores_BTV: Tensor, ids_BTS: Tensor) -> Tensor:
    """bool [B, T, V]: which tokens occur among ids [B, T, S]; id V is the spare one."""
    B, T, V = scores_BTV.shape
    marks = torch.zeros((B, T, V + 1), dtype=torch.bool, device=scores_BTV.device)
    return marks.scatter_(-1, ids_BTS, True)[..., :V]
