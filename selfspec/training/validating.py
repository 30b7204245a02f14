"""Held-out quality of drafts whose k-th token depends on the text alone, not on what was drafted in this round.

For them (a model of its own, a trained exit) the draft at any position, given that all before it were accepted, is the
same however far back the round began: one teacher-forced pass over known text tells everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from selfspec.training.batches import Batch
from selfspec.training.evaluate import Validation
from selfspec.training.losses import CHUNK, acceptance

LOOKAHEAD = 5


@torch.inference_mode()
def validate_chain(
    batches: Iterable[Batch],
    greedy: set[int],
    hidden_of: Callable[[Batch], Tensor],
    logits_of: Callable[[Tensor], Tensor],
    place_V: Tensor | None = None,
) -> Validation:
    """`hidden_of(batch)` `[N, M]`, `logits_of` them; `place_V`: each token's place in a reduced vocabulary, or −1."""
    result = Validation(LOOKAHEAD)
    for batch in batches:
        num = int(batch.weight_N.sum())
        hidden_NM = hidden_of(batch)[:num]
        alpha, agree = [], []
        for part in torch.arange(num, device=hidden_NM.device).split(CHUNK):
            logits = logits_of(hidden_NM[part]).float()
            ids, logp = batch.teacher_ids_NK[part], batch.teacher_logp_NK[part]
            places = ids if place_V is None else place_V[ids]
            reachable = torch.where(places >= 0, logp.float(), -torch.inf)
            alpha.append(acceptance(logits, places.clamp(min=0), reachable))
            agree.append(logits.argmax(-1) == places[:, 0])
        agreed = torch.cat(agree).tolist()
        alphas = torch.cat(alpha).tolist()
        result.add_positions(alphas, agreed)
        for position in range(1, LOOKAHEAD):  # the same wherever the round began
            result.add_alpha(position, alphas)
        by_document: dict[int, list[bool]] = {}
        for document, same in zip(batch.document_N[:num].tolist(), agreed, strict=True):
            by_document.setdefault(document, []).append(same)
        for document, text in by_document.items():
            if document in greedy:
                result.add_greedy_text(text)
    return result
