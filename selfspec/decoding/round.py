"""One round: draft, verify, accept, commit.

Leviathan et al. 2023 (arXiv 2211.17192), Algorithm 1, for every row at once. The draft enters the output only through
`sampler.accept`; the target runs only the layers the draft has not run; rolling back is moving a length. A drafter that
reads the target's hidden states is then shown the true ones of what was committed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from selfspec.decoding.drafting import Drafting
from selfspec.decoding.dynamic_drafting import DynamicTreeDrafting
from selfspec.decoding.tree_drafting import Growing, GrowsTrees, TreeDrafting
from selfspec.decoding.tree_round import as_chain, open_tree
from selfspec.drafters.base import ReadsFeatures, feature_layers_of
from selfspec.lookahead.tree_shape import TreeShape

if TYPE_CHECKING:
    from selfspec.decoding.rows import Rows
    from selfspec.decoding.sampler import Sampler
    from selfspec.decoding.stopwatch import Stopwatch
    from selfspec.drafters.base import Draft, Drafter
    from selfspec.lookahead import Plan, Stopping
    from selfspec.target import Target


def decode_round(
    target: Target,
    drafter: Drafter,
    rows: Rows,
    drafting: Drafting | Growing,
    sampler: Sampler,
    stopwatch: Stopwatch,
) -> Tensor:
    """One round for all rows; returns `Rows.commit`'s report (on the device). Marks the end of each phase."""
    draft = propose(drafter, rows, drafting)  # K tokens, q or None, hidden states worth keeping
    stopwatch.mark("draft")
    logits_BTV, features_BTF = verify(target, rows, draft, feature_layers_of(drafter))  # one pass over K+1 positions
    stopwatch.mark("verify")
    return settle(drafter, rows, draft, logits_BTV, features_BTF, sampler, stopwatch)


def begin_draft(
    rows: Rows, plan: Plan, sampler: Sampler, stopping: Stopping | None = None, may_look: bool = False
) -> Drafting | Growing:
    """The draft phase of a plan: a chain, or a tree."""
    if plan.tree is None:
        return Drafting(rows, plan, sampler, stopping, may_look)
    grows = TreeDrafting if isinstance(plan.tree, TreeShape) else DynamicTreeDrafting
    return grows(rows, plan, sampler)


def propose(drafter: Drafter, rows: Rows, drafting: Drafting | Growing) -> Draft:
    if isinstance(drafting, Drafting):
        return drafter.propose(rows, drafting)
    assert isinstance(drafter, GrowsTrees), "a policy of trees is refused for other drafters"
    return drafter.propose_tree(rows, drafting)


def verify(
    target: Target, rows: Rows, draft: Draft, feature_layers: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor | None]:
    """The target's logits `[B, K+1, V]` at the pending token and every drafted one, running only what is missing; and
    the hidden states entering `feature_layers`, `[B, K+1, F]`.

    A prefix-exit draft kept the hidden states at layer `draft.first_layer`, so only layers [first_layer, L) run.
    """
    width = draft.tokens_BK.shape[1] + 1
    hidden_BTM = draft.hidden_BTM
    if hidden_BTM is None:
        hidden_BTM = target.embed(rows.window(0, width) if draft.tree is None else draft.tree.tokens_BN)
    pass_ = rows.open(0, width) if draft.layout is None else open_tree(rows, draft.layout)
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
    if draft.tree is None:
        logits_BTV = sampler.transform(rows, logits_BTV)
        verdict = sampler.accept(rows, draft, logits_BTV)  # pure, on device
        alpha_B2 = sampler.alpha(draft, logits_BTV, verdict)
    else:
        draft, verdict, alpha_B2, features_BTF = as_chain(rows, draft, logits_BTV, features_BTF, sampler)
    if features_BTF is None or not isinstance(drafter, ReadsFeatures):
        return rows.commit(draft, verdict, alpha_B2)  # lengths move; nothing is copied
    verified_BT = rows.positions(0, draft.tokens_BK.shape[1] + 1)
    report = rows.commit(draft, verdict, alpha_B2)
    stopwatch.mark("other")
    drafter.refresh(rows, rows.seen(verified_BT, verdict.num_accepted_B, features_BTF))
    stopwatch.mark("draft")
    return report


def prefill(target: Target, drafter: Drafter, rows: Rows, row: int, start: int, end: int) -> None:
    """Tokens [start, end) of one row through all layers, in chunks, each shown to the drafter."""
    for pass_, seen in rows.prompt_passes(row, start, end):
        hidden_BTM = target.embed(seen.token_ids_BT)
        _, features_BTF = target.run_tapped(hidden_BTM, 0, target.num_layers, pass_, feature_layers_of(drafter))
        del pass_, hidden_BTM  # a draft model makes masks of its own
        drafter.prefill(rows, replace(seen, features_BTF=features_BTF))
