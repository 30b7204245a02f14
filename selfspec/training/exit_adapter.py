"""Kangaroo's draft (Liu et al. 2024, arXiv 2404.18911): the target's frozen layers [0, E), one trained layer, a norm,
and the target's own frozen head, on a reduced draft vocabulary if wanted.

The trained layer is of the target's own kind and begins as a copy of its last layer. With feed_forward=false it is
attention alone, as Kangaroo's: a quarter of the weights. Everything drafted is conditioned on the text only, so
teacher-forced validation is exact.

Checkpoint: config.json (exit layer, which layer was copied, the target's fingerprint) and model.safetensors:
`layer.*` in the family's own names, `norm.weight`, and `token_ids` of a reduced vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.target.sublayers import without_mlp
from selfspec.training.batches import Batch
from selfspec.training.draft_folder import write_draft
from selfspec.training.draft_vocab import draft_vocabulary
from selfspec.training.evaluate import Validation
from selfspec.training.losses import HeadLoss, head_loss, restrict
from selfspec.training.packed import LayerRunner, reduced_head
from selfspec.training.trainee import check_options
from selfspec.training.validating import validate_chain


@dataclass
class ExitAdapterShape:
    """draft_vocab: a file made by make_data.py, of which the first d_vocab ids can be drafted; null: all tokens."""

    exit_layer: int = 6
    feed_forward: bool = True
    draft_vocab: str | None = None
    d_vocab: int | None = None


class ExitAdapterTrainee:
    def __init__(self, target: Target, shape: ExitAdapterShape, token_ids: Tensor | None) -> None:
        self.target, self.shape = target, shape
        self.feature_layers: tuple[int, ...] = (shape.exit_layer,)
        self.copied_layer = target.num_layers - 1
        self.runner = LayerRunner(target)
        layer = self.runner.copy_layer(self.copied_layer)
        if not shape.feed_forward:
            layer = without_mlp(layer, target.family)
        self.module: nn.Module = nn.ModuleDict({"layer": layer, "norm": self.runner.copy_norm()})
        self.token_ids = token_ids
        self.head_VM, self.place_V = reduced_head(target, token_ids)

    def loss(self, batch: Batch, objective: HeadLoss = head_loss) -> Tensor:
        ids, logp = batch.teacher_ids_NK, batch.teacher_logp_NK
        if self.place_V is not None:
            ids, logp = restrict(ids, logp, self.place_V)
        return objective(self._hidden(batch), self.head_VM, ids, logp, batch.weight_N)

    def validate(self, batches: Iterable[Batch], greedy: set[int]) -> Validation:
        return validate_chain(batches, greedy, self._hidden, lambda h: h @ self.head_VM.T, self.place_V)

    def save(self, folder: Path) -> None:
        config = {
            "kind": "exit_adapter",
            "exit_layer": self.shape.exit_layer,
            "copied_layer": self.copied_layer,
            "feed_forward": self.shape.feed_forward,
        }
        write_draft(folder, config, self.module, self.token_ids, self.target)

    def _hidden(self, batch: Batch) -> Tensor:
        assert batch.features_BTF is not None
        layer, norm = self.module.get_submodule("layer"), self.module.get_submodule("norm")
        window = self.runner.windows[self.copied_layer]
        hidden_BTM = norm(self.runner.run(layer, batch.features_BTF.float(), batch, window))
        return hidden_BTM.flatten(0, 1)[batch.flat_N].float()


def build_exit_adapter(target: Target, options: dict[str, Any]) -> ExitAdapterTrainee:
    """UserError: unknown option, impossible exit layer, a draft vocabulary of another target or without EOS."""
    check_options("exit_adapter", options, asdict(ExitAdapterShape()))
    shape = ExitAdapterShape(**options)
    if not 1 <= shape.exit_layer < target.num_layers:
        raise UserError(
            f"draft.exit_layer={shape.exit_layer} is not possible with {target.name}. "
            f"Allowed: 1 to {target.num_layers - 1}."
        )
    token_ids = draft_vocabulary(target, shape.draft_vocab, shape.d_vocab)
    return ExitAdapterTrainee(target, shape, token_ids)
