"""The rounds of drafting that may begin in a packed batch: where, and what each of their drafts is labelled with.

A round begins at text position p, the last one the target has run; token p+1 is pending, and draft k (from 0) is token
p+2+k. It is labelled with the target's distribution after token p+1+k. The first round of an answer has
p = prompt − 2, so the state right before the last prompt token is supervised and none before it; where p+2+k lies
behind the answer's end, draft k is not.

Shape letters: B rows, T positions, N supervised positions, K drafts, S slots of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.training.batches import Batch

SLOTS = 64  # slots per row are a multiple of this: few shapes, so kernels are built once


@dataclass(frozen=True)
class Starts:
    """Rounds that begin in a batch, one for each supervised position n: its first draft is answer token n."""

    at_N: Tensor  # flat index of p, the last position that the target has run
    label_KN: Tensor  # the supervised position whose distribution draft k is drawn from
    usable_KN: Tensor  # bool: draft k still belongs to the answer (and p to the sample)


def starts_of(batch: Batch, num_drafts: int) -> Starts:
    """The positions of a sample's answer lie side by side in `flat_N`, so draft k's label is k further on."""
    there_N = batch.weight_N > 0
    first_N = there_N & (batch.positions_BT.flatten()[batch.flat_N] > 0)
    last = len(there_N) - 1
    label_KN = torch.arange(num_drafts, device=there_N.device)[:, None] + torch.arange(last + 1, device=there_N.device)
    inside_KN, label_KN = label_KN <= last, label_KN.clamp(max=last)
    same_KN = batch.document_N[label_KN] == batch.document_N
    return Starts((batch.flat_N - 1).clamp(min=0), label_KN, first_N & inside_KN & there_N[label_KN] & same_KN)


@dataclass(frozen=True)
class Slots:
    """Where a chain is unrolled: these positions of each row, and no others."""

    at_BS: Tensor  # position in the row; a slot that nothing begins in holds 0

    def of(self, x_BTX: Tensor) -> Tensor:
        """What lies at these positions: `[B, T, ...]` -> `[B, S, ...]`."""
        rows, width = x_BTX.shape[:2]
        first_B1 = torch.arange(rows, device=self.at_BS.device)[:, None] * width
        chosen: Tensor = x_BTX.flatten(0, 1).index_select(0, (first_B1 + self.at_BS).flatten())
        return chosen.view(*self.at_BS.shape, *x_BTX.shape[2:])


def slots_of(starts: Starts, batch: Batch) -> tuple[Slots, Tensor]:
    """The positions where rounds begin, row by row, and each round's slot as an index into B*S (−1: none begins)."""
    rows, width = batch.token_ids_BT.shape
    begins_N = starts.usable_KN[0]
    row_N = starts.at_N // width
    in_row_BN = begins_N & (row_N == torch.arange(rows, device=row_N.device)[:, None])
    place_N = (in_row_BN.cumsum(1) - 1).gather(0, row_N[None])[0]
    num_slots = -(-max(int(in_row_BN.sum(1).max()), 1) // SLOTS) * SLOTS
    slot_N = torch.where(begins_N, row_N * num_slots + place_N, -1)
    at_BS = torch.zeros(rows * num_slots, dtype=torch.int64, device=row_N.device)
    at_BS[slot_N[begins_N]] = starts.at_N[begins_N] % width
    return Slots(at_BS.view(rows, num_slots)), slot_N
