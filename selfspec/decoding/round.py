"""One round: draft, verify, accept, commit.

Leviathan et al. 2023 (arXiv 2211.17192), Algorithm 1, for every row at once. The draft enters the output only through
`sampler.accept`; the target runs only the layers the draft has not run; rolling back is moving a length. A drafter that
reads the target's hidden states is then shown the true ones of what was committed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from selfspec.drafters.base import ReadsFeatures, feature_layers_of

if TYPE_CHECKING:
    from selfspec.decoding.drafting import Drafting
    from selfspec.decoding.rows import Rows
    from selfspec.decoding.sampler import Sampler
    from selfspec.decoding.stopwatch import Stopwatch
    from selfspec.drafters.base import Draft, Drafter
    from selfspec.target import Target


def decode_round(
    target: Target, drafter: Drafter, rows: Rows, drafting: Drafting, sampler: Sampler, stopwatch: Stopwatch
) -> Tensor:
    """One round for all rows; returns `Rows.commit`'s report (on the device). Marks the end of each phase."""
    draft = drafter.propose(rows, drafting)  # K tokens, q or None, hidden states worth keeping
    stopwatch.mark("draft")
    logits_BTV, features_BTF = verify(target, rows, draft, feature_layers_of(drafter))  # one pass over K+1 positions
    stopwatch.mark("verify")
    return settle(drafter, rows, draft, logits_BTV, features_BTF, sampler, stopwatch)


def verify(
    target: Target, rows: Rows, draft: Draft, feature_layers: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor | None]:
    """The target's logits `[B, K+1, V]` at the pending token and every drafted one, running only what is missing; and
    the hidden states entering `feature_layers`, `[B, K+1, F]`.

    A prefix-exit draft kept the hidden states at layer `draft.first_layer`, so only layers [first_layer, L) run.
    """
    width = draft.tokens_BK.shape[1] + 1
    hidden_BTM = draft.hidden_BTM if draft.hidden_BTM is not None else target.embed(rows.window(0, width))
    pass_ = rows.open(0, width)
    hidden_BTM, features_BTF = target.run_tapped(
        hidden_BTM, draft.first_layer, target.num_layers, pass_, feature_layers
    )
    return target.head(hidden_BTM), features_BTF


def settle(
    drafter: Drafter,
    rows: Rows,
    draft: Draft,
    logits_BTV: Tensor,
    features_BTF: Tensor | None,
    sampler: Sampler,
    stopwatch: Stopwatch,
) -> Tensor:
    """Accept and commit: the only way from a draft into the output. Then the drafter sees what the target has seen."""
    logits_BTV = sampler.transform(rows, logits_BTV)
    verdict = sampler.accept(rows, draft, logits_BTV)  # pure, on device
    seen = rows.seen(draft, verdict) if features_BTF is not None else None
    report = rows.commit(draft, verdict, sampler.alpha(draft, logits_BTV, verdict))  # lengths move; nothing is copied
    if seen is not None and isinstance(drafter, ReadsFeatures):
        stopwatch.mark("other")
        next_ids_BT = rows.following(seen.positions_BT)  # the correction or bonus token is among them now
        drafter.refresh(rows, replace(seen, next_ids_BT=next_ids_BT, features_BTF=features_BTF))
        stopwatch.mark("draft")
    return report


def prefill(target: Target, drafter: Drafter, rows: Rows, row: int, start: int, end: int) -> None:
    """Tokens [start, end) of one row through all layers, in chunks, each shown to the drafter."""
    for pass_, seen in rows.prompt_passes(row, start, end, rows.prefill_width):
        hidden_BTM = target.embed(seen.token_ids_BT)
        _, features_BTF = target.run_tapped(hidden_BTM, 0, target.num_layers, pass_, feature_layers_of(drafter))
        drafter.prefill(rows, replace(seen, features_BTF=features_BTF))
