"""Layer skipping that chooses anew, in context, what to skip: CLaSp (Chen et al. 2025, arXiv 2505.24196).

Verification computes the target's true states of the last token that stays; every few rounds the dynamic program of
`selfspec.drafters.skip_search` asks which layers could have been left out to come nearest to them, and the next drafts
leave those out (`selfspec.drafters.layer_skip`). The number of layers to skip is given, as published: the search has no
sight of what a set brings. `experiments/layer_skip.py search=clasp` says which number pays. The first and the last
layer always run. All rows share one set, chosen by the mean over their last tokens.

The program's branches go through each layer as a tree of siblings: all at the last token's position, each in one of the
slots that the coming round will write anyway, seeing the text before that token and itself. Until the first choice, a
round long, the draft is the target itself.

Cost: every `every` rounds one pass of the target over `num_skipped` + 1 tokens per row, in pieces of the round's width,
and one host read. That read is why rounds with it are not captured as CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfspec.cache import Pass
from selfspec.cache.tree_block import TreeBlock
from selfspec.drafters.base import Draft, Seen
from selfspec.drafters.layer_skip import LayerSkip
from selfspec.drafters.skip_search import Item, best_skips
from selfspec.drafters.skip_set import SkipSet
from selfspec.errors import UserError
from selfspec.target import Target

if TYPE_CHECKING:
    from selfspec.decoding.drafting import Drafting
    from selfspec.decoding.rows import Rows
    from selfspec.decoding.tree_drafting import Growing


@dataclass
class Options:
    """num_skipped: layers that a draft leaves out, 1..L−2. every: rounds between two choices. d_vocab, draft_vocab: as
    for early_exit.
    """

    num_skipped: int
    every: int = 16
    d_vocab: int | None = None
    draft_vocab: str | None = None


@dataclass
class LastTokens:
    """The target's states of each row's last verified token, and what was chosen from them."""

    skipped: SkipSet = field(default_factory=SkipSet)
    num_rounds: int = 0  # verified since a row began with no other one under way
    states_BLM: Tensor | None = None  # behind layers 0, 1, ..., L−1
    positions_B: Tensor | None = None  # −1: a row that took no part, or has another text since
    begun: set[int] = field(default_factory=set)  # rows that a request came into and that have not drafted since
    reads_prompt = False  # nothing of it is kept: what another row has run need not be run again

    def reset(self, row: int, prompt_ids: Sequence[int], request: int) -> None:
        self.begun.add(row)
        if self.positions_B is not None:
            self.positions_B[row].fill_(-1)

    def begin(self, active: Sequence[bool]) -> None:
        """A round begins. Where all of its rows are new the text so far counts for nothing."""
        taking_part = {row for row, is_active in enumerate(active) if is_active}
        if taking_part <= self.begun:
            self.skipped, self.num_rounds = SkipSet(), 0
        self.begun -= taking_part


class Clasp:
    """Drafts from the target without `num_skipped` layers, chosen again every `every` rounds."""

    name = "clasp"
    max_drafted: int | None = None
    reads_host = True  # in some rounds: none is captured (`selfspec.decoding.graphs`)

    def __init__(
        self,
        target: Target,
        num_skipped: int,
        every: int = 16,
        d_vocab: int | None = None,
        draft_vocab: str | None = None,
    ) -> None:
        if not 1 <= num_skipped <= target.num_layers - 2:
            raise UserError(
                f"num_skipped={num_skipped} is not possible with {target.name}: of its {target.num_layers} layers the "
                f"first and the last always run. Allowed are 1 to {target.num_layers - 2}."
            )
        if every < 1:
            raise UserError(f"every={every} is not possible: allowed is 1 or more rounds.")
        self.target, self.num_skipped, self.every = target, num_skipped, every
        # all layers' true states are read, so verification keeps nothing but layer 0's from the draft
        self._draft = LayerSkip(target, SkipSet(), d_vocab, draft_vocab, most_kept=1)
        self.feature_layers = tuple(range(1, target.num_layers + 1))

    @property
    def skipped(self) -> SkipSet:
        """What the last draft left out."""
        return self._draft.skipped

    def draft_bytes(self, num_rows: int, capacity: int) -> tuple[int, int]:
        per_row = self.target.num_layers * self.target.width * self.target.dtype.itemsize
        return self._draft.draft_bytes(num_rows, capacity)[0], num_rows * per_row

    def start(self, rows: Rows) -> None:
        rows.draft_state = LastTokens()

    def prefill(self, rows: Rows, seen: Seen) -> None:
        """Nothing to do: the target's prefill has written every layer's keys and values."""

    def refresh(self, rows: Rows, seen: Seen) -> None:
        assert seen.features_BTF is not None
        at_B1 = seen.last_B[:, None]
        features_BF = seen.features_BTF.gather(1, at_B1[..., None].expand(-1, -1, seen.features_BTF.shape[-1]))[:, 0]
        last = state_of(rows)
        last.states_BLM = features_BF.unflatten(-1, (self.target.num_layers, self.target.width))
        last.positions_B = seen.positions_BT.gather(1, at_B1)[:, 0]
        last.num_rounds += 1

    def propose(self, rows: Rows, drafting: Drafting) -> Draft:
        self._prepare(rows, drafting.plan.width)
        return self._draft.propose(rows, drafting)

    def propose_tree(self, rows: Rows, growing: Growing) -> Draft:
        self._prepare(rows, growing.plan.width)
        return self._draft.propose_tree(rows, growing)

    def _prepare(self, rows: Rows, width: int) -> None:
        """The set of these rows' drafts; others may have drafted with another one since."""
        last = state_of(rows)
        if last.begun:
            last.begin(rows.active_B.tolist())
        if last.num_rounds and (last.num_rounds - 1) % self.every == 0:
            self._choose(rows, last, width)
        if self._draft.skipped != last.skipped:
            self._draft.skip(last.skipped)

    def _choose(self, rows: Rows, last: LastTokens, width: int) -> None:
        """A new set, from the rows that are still where their last states are from."""
        assert last.states_BLM is not None and last.positions_B is not None
        chosen_N = (rows.active_B & (last.positions_B >= 0)).nonzero()[:, 0]  # a host read, as is the result
        if len(chosen_N) == 0:
            return
        inner = range(1, self.target.num_layers - 1)
        # a row with another text since then writes nothing: its slots of those numbers may hold that text
        pass_ = siblings(rows, last.positions_B, width)
        states_LNM = last.states_BLM[chosen_N].transpose(0, 1)
        run = [self._branches(layer, pass_, chosen_N, width) for layer in inner]
        found = best_skips(run, [states_LNM[0], *states_LNM[1:-1]], [1] * len(inner), self.num_skipped)[-1]
        assert found is not None, "any so many layers can be skipped"
        layers = [inner[item] for item in found.items]
        last.skipped = SkipSet.of(layers, layers)

    def _branches(self, layer: int, pass_: Pass, chosen_N: Tensor, width: int) -> Item:
        def some(states_wNM: Tensor) -> Tensor:
            by_row_BwM = states_wNM.new_zeros(pass_.positions_BT.shape[0], width, states_wNM.shape[-1])
            by_row_BwM[chosen_N, : len(states_wNM)] = states_wNM.transpose(0, 1)
            ran_BwM = self.target.run_layers(by_row_BwM, layer, layer + 1, pass_)
            return ran_BwM[chosen_N, : len(states_wNM)].transpose(0, 1)

        return lambda states_WNM: torch.cat([some(part) for part in states_WNM.split(width)])


def state_of(rows: Rows) -> LastTokens:
    assert isinstance(rows.draft_state, LastTokens), "start() was not called for these rows"
    return rows.draft_state


def siblings(rows: Rows, positions_B: Tensor, width: int) -> Pass:
    """A pass of `width` tokens per row, all at that row's position, in the slots that the coming round writes."""
    steps = torch.arange(width, device=rows.device)
    takes_part_B1 = rows.active_B[:, None] & (positions_B[:, None] >= 0)
    slots_BT = torch.where(takes_part_B1, positions_B[:, None] + 1 + steps, -1)
    positions_BN = positions_B.clamp(min=0)[:, None].expand(-1, width + 1)  # node 0: the token itself, as it was run
    seen_TN = torch.eye(width + 1, dtype=torch.bool, device=rows.device)[1:]
    block = TreeBlock(slots_BT, positions_B.clamp(min=0), positions_BN, seen_TN.expand(rows.num_rows, -1, -1))
    positions_BT = torch.where(takes_part_B1, positions_BN[:, 1:], -1)
    return rows.cache.open(positions_BT, rows.extent(0, width), tree=block)


def build(target: Target, options: Options) -> Clasp:
    return Clasp(target, options.num_skipped, options.every, options.d_vocab, options.draft_vocab)
