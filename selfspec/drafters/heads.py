"""What drafts made of prediction heads share: the target's last hidden state, kept from round to round, and the output
matrix that turns a head's state into logits.

Medusa (Cai et al. 2024, arXiv 2401.10774) and Hydra (Ankner et al. 2024, arXiv 2402.05109) read one hidden state: that
at the last position the target has run, right before the pending token, behind the final norm. The output matrix is
the target's own (frozen; all tokens, or the reduced draft vocabulary), or one of each head's own.

Cost: B × M numbers of state. Nothing is refreshed but that row of the features.

Shape letters: B rows, K heads, M width, N tokens of the draft vocabulary, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from selfspec.cache import KVCache
from selfspec.drafters.base import Seen
from selfspec.drafters.checkpoint import Checkpoint
from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.target.packed import PackedLinear
from selfspec.target.stack import spread

if TYPE_CHECKING:
    from selfspec.decoding.rows import Rows


@dataclass
class LastState:
    """Per row the hidden state at the last position, before the final norm; zeros for a prompt of one token, of which
    the target has run nothing yet. `cache`: of a trained layer that the state has gone through (`hydra`).
    """

    hidden_BM: Tensor
    cache: KVCache | None = None

    def reset(self, row: int, prompt_ids: Sequence[int], request: int) -> None:
        self.hidden_BM[row].zero_()


def start_state(target: Target, rows: Rows, cache: KVCache | None = None) -> None:
    hidden_BM = torch.zeros(rows.num_rows, target.width, dtype=target.dtype, device=target.device)
    rows.draft_state = LastState(hidden_BM, cache)


def keep_state(rows: Rows, seen: Seen) -> None:
    """The target's state at the last position that stays; rejected drafts lie behind it."""
    assert seen.features_BTF is not None
    seen.keep(state_of(rows).hidden_BM, seen.features_BTF)


def state_of(rows: Rows) -> LastState:
    assert isinstance(rows.draft_state, LastState), "start() was not called for these rows"
    return rows.draft_state


class Outputs:
    """Heads' states -> logits over all tokens, −inf where a token cannot be drafted."""

    def __init__(self, target: Target, own: Sequence[nn.Linear], token_ids: Tensor | None) -> None:
        """own: one output matrix for each head; none: the target's, in one product for all heads that are asked."""
        self.token_ids, self.vocab_size = token_ids, target.vocab_size
        self.own = [packed(matrix) for matrix in own]
        self.reduced = None if token_ids is None or own else target.reduced_unembed(token_ids)
        self.tied = self.reduced or target.unembed

    @property
    def nbytes(self) -> int:
        """Of their own matrices, or of the rows of the target's that a reduced vocabulary copies."""
        if self.reduced is not None:
            return self.reduced.nbytes
        ids = 0 if self.token_ids is None else self.token_ids.nbytes
        return ids + sum(matrix.nbytes for matrix in self.own)

    def __call__(self, hidden_BKM: Tensor, first: int = 0) -> Tensor:
        """Logits `[B, K, V]` of heads `first`, `first` + 1, ..."""
        if not self.own:
            return self.tied(hidden_BKM)
        each = [self.own[first + k](hidden_BKM[:, k : k + 1]) for k in range(hidden_BKM.shape[1])]
        logits_BKN = torch.cat(each, 1)
        return logits_BKN if self.token_ids is None else spread(logits_BKN, self.token_ids, self.vocab_size)


def bytes_of(first: Sequence[PackedLinear], further: Sequence[Sequence[PackedLinear]], outputs: Outputs) -> int:
    """Of the heads' first blocks, the blocks behind them, and what turns their states into logits."""
    return sum(block.nbytes for block in chain(first, *further)) + outputs.nbytes


def linears(modules: nn.Module) -> list[nn.Linear]:
    found = list(modules.children())
    assert all(isinstance(module, nn.Linear) for module in found)
    return cast(list[nn.Linear], found)


def packed(*together: nn.Linear) -> PackedLinear:
    """Linear layers that read the same as one packed product, their results side by side."""
    weight_OI = torch.cat([linear.weight for linear in together])
    if together[0].bias is None:
        return PackedLinear(weight_OI, None)
    return PackedLinear(weight_OI, torch.cat([linear.bias for linear in together]))


def read_count(checkpoint: Checkpoint, name: str) -> int:
    """A whole number, 1 or more, of config.json."""
    value = checkpoint.config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{checkpoint.folder}/config.json says {name}={value!r}; allowed are whole numbers from 1 on.")
    return value


def read_flag(checkpoint: Checkpoint, name: str) -> bool:
    value = checkpoint.config.get(name)
    if not isinstance(value, bool):
        raise UserError(f"{checkpoint.folder}/config.json says {name}={value!r}; allowed are true and false.")
    return value


def num_outputs(checkpoint: Checkpoint, target: Target) -> int:
    """Rows of an output matrix of a head's own."""
    return target.vocab_size if checkpoint.token_ids is None else len(checkpoint.token_ids)
