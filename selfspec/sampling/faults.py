"""Bad numbers, found on the device without reading the host, reported on the host with row and position.

A rule packs what it met into one int64 per row: 0 is fine, else kind + 8 * (offset in the round). Only positions
that matter are looked at: a bad row behind a rejected draft would never have been computed without speculation.
The decoder reads the code together with the round's lengths and calls `raise_for`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.errors import UserError

OK, NAN_LOGITS, INFINITE_LOGITS, NOTHING_LEFT, BAD_DRAFT_DISTRIBUTION, IMPOSSIBLE_DRAFT = range(6)
MESSAGES = {
    NAN_LOGITS: "the target's logits hold NaN: check the weights, the dtype and your processors",
    INFINITE_LOGITS: "the target's logits hold +inf: check the weights, the dtype and your processors",
    NOTHING_LEFT: "every token has been removed (all logits are -inf): loosen the sampling transforms, the suppressed "
    "tokens or your processors",
    BAD_DRAFT_DISTRIBUTION: "the drafter's q is not a distribution (it holds NaN or does not sum to 1): return the q "
    "that the rule's draw() gave",
    IMPOSSIBLE_DRAFT: "the drafted token has probability 0 under the drafter's q: return the token and the q of "
    "the same draw() call",
}


def logits_fault(top: Tensor) -> Tensor:
    """Kind of fault of logits rows, given each row's largest logit (torch's max and argmax propagate NaN)."""
    fault = torch.where(torch.isnan(top), NAN_LOGITS, OK)
    fault = torch.where(top == torch.inf, INFINITE_LOGITS, fault)
    return torch.where(top == -torch.inf, NOTHING_LEFT, fault)


def first_fault(fault_BK: Tensor, counts_BK: Tensor) -> Tensor:
    """Code [B] of the first fault among the positions that count, or 0."""
    offset_K = torch.arange(fault_BK.shape[1], device=fault_BK.device)
    none = 1 << 40
    code_BK = torch.where(counts_BK & (fault_BK != OK), fault_BK + 8 * offset_K, none)
    code_B = torch.nn.functional.pad(code_BK, (0, 1), value=none).amin(dim=1)
    return torch.where(code_B == none, OK, code_B)


def earliest(code_B: Tensor, other_B: Tensor) -> Tensor:
    """Of two codes per row, the one at the smaller offset; 0 means no fault."""
    swap = (other_B != OK) & ((code_B == OK) | (other_B // 8 < code_B // 8))
    return torch.where(swap, other_B, code_B)


def raise_for(error_code: int, *, row: int, position: int) -> None:
    """Raise UserError unless the code is 0. `position` is that of the round's first drafted token (NoiseKey's)."""
    if error_code == OK:
        return
    kind, offset = error_code % 8, error_code // 8
    raise UserError(f"row {row}, position {position + offset}: {MESSAGES[kind]}.")
