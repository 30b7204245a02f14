"""Draft with the target's own first E layers, its final norm and its head; verify with the rest.

The draft writes layers [0, E) of the shared cache and keeps the hidden state at E of every token it ran, so that
verification runs [E, L) and no layer below E ever sees a token twice (`selfspec.drafters.kept_layers`). LayerSkip
(Elhoushi et al. 2024) is this with a model trained for it; an untrained model agrees with its own exits too rarely to
gain.

Cost of a round, in layer loads: E*(K+1) + (L−E), plus K+1 heads; `d_vocab` shrinks the draft's K of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from selfspec.drafters.base import Draft, Seen
from selfspec.drafters.draft_vocab import draft_head
from selfspec.drafters.kept_layers import KeptLayers
from selfspec.errors import UserError
from selfspec.target import Target

if TYPE_CHECKING:
    from selfspec.decoding.drafting import Drafting
    from selfspec.decoding.rows import Rows
    from selfspec.decoding.tree_drafting import Growing
    from selfspec.lookahead import Plan


@dataclass
class Options:
    """exit_layer: layers run by the draft, 1..L−1. d_vocab: size of the reduced draft vocabulary; None: all tokens.
    draft_vocab: a file with `token_ids`, likeliest first (safetensors); None: the tokenizer's first ids.
    """

    exit_layer: int
    d_vocab: int | None = None
    draft_vocab: str | None = None


class EarlyExit:
    """Drafts from layers [0, exit_layer) of the target itself."""

    name = "early_exit"
    max_drafted: int | None = None

    def __init__(
        self, target: Target, exit_layer: int, d_vocab: int | None = None, draft_vocab: str | None = None
    ) -> None:
        self.target = target
        self.check_exit(exit_layer)
        self.exit_layer = exit_layer
        self._head, self._head_bytes = draft_head(target, d_vocab, draft_vocab)

    def draft_bytes(self, num_rows: int, capacity: int) -> tuple[int, int]:
        return self._head_bytes, 0

    def check_exit(self, exit_layer: int) -> None:
        """UserError unless the target has layers before and behind that exit."""
        if not 1 <= exit_layer < self.target.num_layers:
            raise UserError(
                f"exit_layer={exit_layer} is not possible with {self.target.name}, which has {self.target.num_layers} "
                f"layers: allowed are 1 to {self.target.num_layers - 1}."
            )

    def start(self, rows: Rows) -> None:
        rows.draft_state = None

    def prefill(self, rows: Rows, seen: Seen) -> None:
        """Nothing to do: the target's prefill has written layers [0, E) already."""

    def propose(self, rows: Rows, drafting: Drafting) -> Draft:
        return self._up_to(drafting.plan).chain(rows, drafting)

    def propose_tree(self, rows: Rows, growing: Growing) -> Draft:
        return self._up_to(growing.plan).tree(rows, growing)

    def _up_to(self, plan: Plan) -> KeptLayers:
        """The layers before the exit of this round."""
        exit_layer = self.exit_layer if plan.exit_layer is None else plan.exit_layer
        return KeptLayers(self.target, exit_layer, lambda hidden_BTM, stretch: self._head(hidden_BTM))


def build(target: Target, options: Options) -> EarlyExit:
    return EarlyExit(target, options.exit_layer, options.d_vocab, options.draft_vocab)
