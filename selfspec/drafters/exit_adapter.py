"""Draft from the target's first E layers, one trained layer and the target's head: Kangaroo.

Liu et al. 2024 (arXiv 2404.18911). Layers [0, E) run on the shared cache and are kept for verification, which starts at
E (as `early_exit`); the trained layer reads their output and has keys and values of its own. It runs on all K+1 tokens,
the last drafted one included: whatever is accepted, nothing of it is missing. Its keys and values depend on the text
alone, so those of accepted tokens stay right and there is nothing to refresh.

Cost of a round, in layer loads: (E+1)*(K+1) + (L−E), plus K+1 heads; `d_vocab` shrinks the draft's K of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from selfspec.cache import KVCache
from selfspec.drafters.base import Draft, Seen
from selfspec.drafters.checkpoint import load_into, read_checkpoint
from selfspec.drafters.draft_layer import blank_parts, config_value, target_head, target_like
from selfspec.drafters.kept_layers import KeptLayers
from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.target.fused import RMSNorm
from selfspec.target.sublayers import without_mlp

if TYPE_CHECKING:
    from selfspec.decoding.drafting import Drafting
    from selfspec.decoding.rows import Rows
    from selfspec.decoding.tree_drafting import Growing


@dataclass
class Options:
    """checkpoint: a folder with a trained draft, made by experiments/train.py."""

    checkpoint: str


class ExitAdapter:
    """Drafts from the exit that its layer was trained for, and no other."""

    name = "exit_adapter"
    max_drafted: int | None = None

    def __init__(
        self, target: Target, exit_layer: int, copied_layer: int, parts: nn.ModuleDict, token_ids_V: Tensor | None
    ) -> None:
        self.target, self.exit_layer = target, exit_layer
        self.feature_layers = (exit_layer,)
        self._layer = target_like(target, parts["layer"], copied_layer)
        self._norm = RMSNorm(parts["norm"])
        self._unembed, head_bytes = target_head(target, token_ids_V)
        self._weight_bytes = self._layer.nbytes + head_bytes

    def draft_bytes(self, num_rows: int, capacity: int) -> tuple[int, int]:
        return self._weight_bytes, self._layer.cache_bytes(num_rows, capacity)

    def start(self, rows: Rows) -> None:
        rows.draft_state = self._layer.make_cache(rows)

    def prefill(self, rows: Rows, seen: Seen) -> None:
        assert seen.features_BTF is not None
        self._layer(seen.features_BTF, _cache_of(rows).open(seen.positions_BT, seen.extent, seen.rows))

    def refresh(self, rows: Rows, seen: Seen) -> None:
        """Nothing to do: drafting read the target's own hidden states."""

    def propose(self, rows: Rows, drafting: Drafting) -> Draft:
        assert drafting.plan.exit_layer in (None, self.exit_layer), "a policy of exits is refused before"
        return self._adapted(rows).chain(rows, drafting)

    def propose_tree(self, rows: Rows, growing: Growing) -> Draft:
        return self._adapted(rows).tree(rows, growing)

    def _adapted(self, rows: Rows) -> KeptLayers:
        """Layers [0, E), and the trained layer on top of every token."""
        cache = _cache_of(rows)
        return KeptLayers(
            self.target,
            self.exit_layer,
            logits=lambda adapted_BTM, stretch: self._unembed(self._norm(adapted_BTM)),
            on_all=lambda hidden_BTM, stretch: self._layer(hidden_BTM, stretch.open(cache)),
        )


def _cache_of(rows: Rows) -> KVCache:
    assert isinstance(rows.draft_state, KVCache), "start() was not called for these rows"
    return rows.draft_state


def build(target: Target, options: Options) -> ExitAdapter:
    checkpoint = read_checkpoint(options.checkpoint, "exit_adapter", target)
    exit_layer, copied = config_value(checkpoint, "exit_layer"), config_value(checkpoint, "copied_layer")
    if not 1 <= exit_layer < target.num_layers or not 0 <= copied < target.num_layers:
        raise UserError(
            f"{checkpoint.folder}/config.json: exit_layer={exit_layer} and copied_layer={copied} are not possible with "
            f"{target.num_layers} layers."
        )
    parts = blank_parts(target, "exit_adapter")
    if not checkpoint.config.get("feed_forward", True):  # drafts from before there was a choice have one
        parts["layer"] = without_mlp(parts["layer"], target.family)
    load_into(parts, checkpoint)
    return ExitAdapter(target, exit_layer, copied, parts, checkpoint.token_ids)
