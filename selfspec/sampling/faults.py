"""Bad numbers, found on the device without reading the host, reported on the host with row and position.

A rule packs what it met into one int64 per row: 0 is fine, else kind + 8 * (offset in the round). Only positions
that matter are looked at: a bad row behind a rejected draft would never have been computed without speculation.
The decoder reads the code together with the round's lengths and calls `raise_for`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.errors import UserError

OK, NAN_LOGITS, INFINITE_LOGITS, NOTHING_LEFT, BAD_DRAFT_DISTRIBUTION, IMPOSSIBLE_DRAFT, BROKEN_DRAFT = range(7)
Q_SUM_TOLERANCE = 1e-4  # a float32 softmax is off by about 1e-6, one in half precision by more than this
MESSAGES = {
    NAN_LOGITS: "the target's logits hold NaN: check the weights, the dtype and your processors",
    INFINITE_LOGITS: "the target's logits hold +inf: check the weights, the dtype and your processors",
    NOTHING_LEFT: "every token has been removed (all logits are -inf): "
    "loosen the sampling transforms, the suppressed tokens or your processors",
    BAD_DRAFT_DISTRIBUTION: "the drafter's q is not a distribution (it holds NaN or negative numbers, or does not sum "
    "to 1): return the q that the rule's draw() gave",
    IMPOSSIBLE_DRAFT: "the drafted token has probability 0 under the drafter's q: "
    "return the token and the q of the same draw() call",
    BROKEN_DRAFT: "the draft's logits hold NaN or +inf: check the drafter's weights, the dtype and your processors",
}


def logits_fault(top: Tensor) -> Tensor:
    """Kind of fault of logits rows, given each row's largest logit (torch's max and argmax propagate NaN)."""
    fault = torch.where(torch.isnan(top), NAN_LOGITS, OK)
    fault = torch.where(top == torch.inf, INFINITE_LOGITS, fault)
    return torch.where(top == -torch.inf, NOTHING_LEFT, fault)


def broken(top: Tensor) -> Tensor:
    """bool: no draft can be drawn from logits whose largest is this one: NaN or +inf."""
    return torch.isnan(top) | (top == torch.inf)


def ending_fault(logits_BTV: Tensor, end_B: Tensor, offset_B: Tensor | None = None) -> Tensor:
    """Code [B] for the logits that the round's last token comes from: row `end`, at `offset` (the same for chains)."""
    fault_B = logits_fault(logits_BTV.amax(dim=-1).gather(1, end_B[:, None])[:, 0])
    return at_offset(fault_B, end_B if offset_B is None else offset_B)


def at_offset(fault_B: Tensor, offset_B: Tensor) -> Tensor:
    """Pack a kind of fault and the offset where it was met."""
    return torch.where(fault_B == OK, OK, fault_B + 8 * offset_B)


def draft_fault(q_BKV: Tensor, q_x_BK: Tensor, tested_BK: Tensor) -> Tensor:
    """Code [B] of the first tested draft whose q is not a distribution, or gives the drafted token probability 0."""
    fault_BK = torch.where(q_x_BK > 0, OK, IMPOSSIBLE_DRAFT)
    is_distribution_BK = ((q_BKV.sum(dim=-1) - 1).abs() <= Q_SUM_TOLERANCE) & (q_BKV.amin(dim=-1) >= 0)
    fault_BK = torch.where(is_distribution_BK, fault_BK, BAD_DRAFT_DISTRIBUTION)
    return first_fault(torch.where(tested_BK, fault_BK, OK))


def first_fault(fault_BK: Tensor) -> Tensor:
    """Code [B] of the first of a row's kinds of fault that is one."""
    offset_K = torch.arange(fault_BK.shape[1], device=fault_BK.device)
    none = 1 << 40
    code_BK = torch.where(fault_BK != OK, fault_BK + 8 * offset_K, none)
    code_B = torch.nn.functional.pad(code_BK, (0, 1), value=none).amin(dim=1)
    return torch.where(code_B == none, OK, code_B)


def earliest(code_B: Tensor, other_B: Tensor) -> Tensor:
    """Of two codes per row, the one at the smaller offset; 0 means no fault."""
    swap = (other_B != OK) & ((code_B == OK) | (other_B // 8 < code_B // 8))
    return torch.where(swap, other_B, code_B)


def fault_offset(error_code: int) -> int:
    """Offset in the round at which a fault makes the output wrong. A draft that breaks its contract may have changed
    what was accepted in front of it: it counts from the round's start.
    """
    return 0 if error_code % 8 in (BAD_DRAFT_DISTRIBUTION, IMPOSSIBLE_DRAFT) else error_code // 8


def raise_for(error_code: int, *, row: int, position: int) -> None:
    """Raise UserError unless the code is 0. `position` is that of the round's first drafted token (NoiseKey's)."""
    if error_code == OK:
        return
    kind, offset = error_code % 8, error_code // 8
    raise UserError(f"row {row}, position {position + offset}: {MESSAGES[kind]}.")
