"""One round: draft, verify, accept, commit.

Leviathan et al. 2023 (arXiv 2211.17192), Algorithm 1, for every row at once. The draft enters the output only through
`sampler.accept`; the target runs only the layers the draft has not run; rolling back is moving a length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from selfspec.decoding.rows import Rows
    from selfspec.decoding.sampler import Sampler
    from selfspec.decoding.stopwatch import Stopwatch
    from selfspec.drafters.base import Draft, Drafter
    from selfspec.target import Target


def decode_round(
    target: Target, drafter: Drafter, rows: Rows, num_drafted: int, sampler: Sampler, stopwatch: Stopwatch
) -> Tensor:
    """One round for all rows; returns `Rows.commit`'s report (on the device). Marks the end of each phase."""
    draft = drafter.propose(rows, num_drafted, sampler)  # K tokens, q or None, hidden states worth keeping
    stopwatch.mark("draft")
    logits_BTV = verify(target, rows, draft)  # one pass over K+1 positions, shared cache
    stopwatch.mark("verify")
    return settle(rows, draft, logits_BTV, sampler)


def settle(rows: Rows, draft: Draft, logits_BTV: Tensor, sampler: Sampler) -> Tensor:
    """Accept and commit: the only way from a draft into the output."""
    logits_BTV = sampler.transform(rows, logits_BTV)
    verdict = sampler.accept(rows, draft, logits_BTV)  # pure, on device
    return rows.commit(draft, verdict, sampler.alpha(draft, logits_BTV, verdict))  # lengths move; nothing is copied


def verify(target: Target, rows: Rows, draft: Draft) -> Tensor:
    """The target's logits `[B, K+1, V]` at the pending token and every drafted one, running only what is missing.

    A prefix-exit draft kept the hidden states at layer `draft.first_layer`, so only layers [first_layer, L) run.
    """
    width = draft.tokens_BK.shape[1] + 1
    hidden_BTM = draft.hidden_BTM if draft.hidden_BTM is not None else target.embed(rows.window(0, width))
    hidden_BTM = target.run_layers(hidden_BTM, draft.first_layer, target.num_layers, rows.open(0, width))
    return target.head(hidden_BTM)


def prefill(target: Target, drafter: Drafter, rows: Rows, row: int, start: int, end: int) -> None:
    """Tokens [start, end) of one row through all layers, in chunks of fixed width; then the drafter's own prefill."""
    for pass_, token_ids_1T in rows.prompt_passes(rows.cache, row, start, end, PREFILL_CHUNK):
        target.run_layers(target.embed(token_ids_1T), 0, target.num_layers, pass_)
    drafter.prefill(rows, row, start, end)


PREFILL_CHUNK = 64  # fixed, so that the CPU keeps its kernels; padding goes to the trash slot
