"""Draft with the target's own first E layers, its final norm and its head; verify with the rest.

The draft writes layers [0, E) of the shared cache and keeps the hidden state at E of every token it ran, the last
drafted one included (Kangaroo's order, Liu et al. 2024: the shallow pass comes before the decision to stop), so
verification runs [E, L) and no layer below E ever sees a token twice. LayerSkip (Elhoushi et al. 2024) is this with a
model trained for it; an untrained model agrees with its own exits too rarely to gain.

Cost of a round, in layer loads: E*(K+1) + (L−E), plus K+1 heads; `d_vocab` shrinks the draft's K of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfspec.drafters.base import Draft, Seen
from selfspec.drafters.draft_vocab import draft_head
from selfspec.errors import UserError
from selfspec.target import Target

if TYPE_CHECKING:
    from selfspec.decoding.drafting import Drafting
    from selfspec.decoding.rows import Rows
    from selfspec.decoding.tree_drafting import Growing


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
        exit_layer = self.exit_layer if drafting.plan.exit_layer is None else drafting.plan.exit_layer

        def shallow(step: int) -> Tensor:
            return self.target.run_layers(self.target.embed(rows.window(step, 1)), 0, exit_layer, rows.open(step, 1))

        hidden = [shallow(0)]
        for step in drafting:
            drafting.draw(self._head(hidden[-1])[:, 0])
            hidden.append(shallow(step + 1))  # the last drafted token is run, though nothing is drafted from it
        return drafting.draft(torch.cat(hidden, 1), first_layer=exit_layer)

    def propose_tree(self, rows: Rows, growing: Growing) -> Draft:
        """Every node goes through layers [0, E), the leaves too: they are verified from there."""
        exit_layer = self.exit_layer if growing.plan.exit_layer is None else growing.plan.exit_layer
        extent = rows.extent(0, growing.plan.width)

        def shallow(nodes: slice) -> Tensor:
            positions_BT, block = growing.block(nodes)
            token_ids_BT = rows.window(nodes.start, nodes.stop - nodes.start)
            pass_ = rows.cache.open(positions_BT, extent, tree=block)
            return self.target.run_layers(self.target.embed(token_ids_BT), 0, exit_layer, pass_)

        hidden = [shallow(slice(0, 1))]
        for _ in growing:
            num_inner = growing.nodes.stop - growing.nodes.start
            growing.grow(self._head(hidden[-1][:, :num_inner]))
            hidden.append(shallow(growing.drawn))
        return growing.draft(torch.cat(hidden, 1), first_layer=exit_layer)


def build(target: Target, options: Options) -> EarlyExit:
    return EarlyExit(target, options.exit_layer, options.d_vocab, options.draft_vocab)
