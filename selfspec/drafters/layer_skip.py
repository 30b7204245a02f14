"""Draft with the target minus some of its attention and MLP sublayers; nothing is trained.

Draft & Verify (Zhang et al. 2023, arXiv 2309.08168), section 3: the draft is the target with chosen sublayers left out
of the residual stream. It shares the target's cache: kept attention reads the true keys of committed tokens and writes
tentative ones for drafted tokens, skipped attention writes none, and verification writes every layer anew.

Two differences, both savings and neither a change of the draft. All layers below the first skip compute what the
target computes, so their output is kept and verification starts there, as with an early exit (the paper's code
verifies with all layers); skipping all of [E, L) *is* an early exit at E. And nothing is copied: no second cache.

Cost of a round, in layers: K * kept + a + (L − a) on K+1 tokens, a = first layer with a skip, plus K+1 heads.
The draft can be at most L / kept times as fast as the target: the gain is bounded whatever is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from selfspec.drafters.base import Draft, Seen
from selfspec.drafters.draft_vocab import draft_head
from selfspec.drafters.kept_layers import KeptLayers
from selfspec.drafters.skip_set import SkipSet, check_set, read_set
from selfspec.drafters.stretch import Stretch
from selfspec.errors import UserError
from selfspec.target import Target

if TYPE_CHECKING:
    from selfspec.decoding.drafting import Drafting
    from selfspec.decoding.rows import Rows
    from selfspec.decoding.tree_drafting import Growing


@dataclass
class Options:
    """skip_attention, skip_mlp: layers, counted from 0, whose attention or MLP is left out. sets: instead of these, a
    file from experiments/layer_skip.py, or its folder. d_vocab, draft_vocab: as for early_exit.
    """

    skip_attention: list[int] | None = None
    skip_mlp: list[int] | None = None
    sets: str | None = None
    d_vocab: int | None = None
    draft_vocab: str | None = None


class LayerSkip:
    """Drafts from the target's layers without the sublayers in `skipped`."""

    name = "layer_skip"
    max_drafted: int | None = None

    def __init__(
        self,
        target: Target,
        skipped: SkipSet,
        d_vocab: int | None = None,
        draft_vocab: str | None = None,
        most_kept: int | None = None,
    ) -> None:
        """most_kept: verification goes on from this layer at the latest; None: from the first with a skip."""
        check_set(skipped, target)
        self.target, self.most_kept = target, target.num_layers if most_kept is None else most_kept
        self._head, self._head_bytes = draft_head(target, d_vocab, draft_vocab)
        self.skip(skipped)

    def skip(self, skipped: SkipSet) -> None:
        """Draft without these from now on. Not between the capture and the replay of a round."""
        self.skipped = skipped
        self._first = min(skipped.first(self.target.num_layers), self.most_kept)
        self._layers = self.target.thinned(skipped.attention, skipped.mlp)

    def draft_bytes(self, num_rows: int, capacity: int) -> tuple[int, int]:
        return self._head_bytes, 0

    def start(self, rows: Rows) -> None:
        rows.draft_state = None

    def prefill(self, rows: Rows, seen: Seen) -> None:
        """Nothing to do: the target's prefill has written every layer's keys and values."""

    def propose(self, rows: Rows, drafting: Drafting) -> Draft:
        return self._whole(rows).chain(rows, drafting)

    def propose_tree(self, rows: Rows, growing: Growing) -> Draft:
        return self._whole(rows).tree(rows, growing)

    def _whole(self, rows: Rows) -> KeptLayers:
        """The layers below the first skip; through the others go only tokens that are drafted from."""
        target, first, layers = self.target, self._first, self._layers

        def logits(hidden_BTM: Tensor, stretch: Stretch) -> Tensor:
            pass_ = stretch.open(rows.cache)
            return self._head(target.run_layers(hidden_BTM, first, target.num_layers, pass_, layers))

        return KeptLayers(target, first, logits)


def build(target: Target, options: Options) -> LayerSkip:
    """UserError: nothing to skip is named, or in two ways; and what `check_set`, `read_set` and `draft_head` refuse."""
    listed = options.skip_attention is not None or options.skip_mlp is not None
    if listed == (options.sets is not None):
        how = "both given" if listed else "neither given"
        raise UserError(
            f"The drafter 'layer_skip' needs skip_attention and skip_mlp, or sets=<file>; {how}. Search a set: "
            "python experiments/layer_skip.py"
        )
    if options.sets is not None:
        skipped = read_set(options.sets, target)
    else:
        skipped = SkipSet.of(options.skip_attention or (), options.skip_mlp or ())
        if skipped.size == 0:
            raise UserError("skip_attention and skip_mlp are empty: that draft is the target itself. Name layers.")
    return LayerSkip(target, skipped, options.d_vocab, options.draft_vocab)
