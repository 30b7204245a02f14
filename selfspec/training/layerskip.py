"""LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710): the target trained on, so that its own early layers can draft.

Unlike a draft beside the target this changes the target: the result is **another target**, and decoding with it is
lossless with respect to that one, not to its base. How far it has moved from the base is measured and on the card.

What is trained with: layer dropout, an early-exit loss through the one final norm and head, a curriculum
(`selfspec.training.layerskip_schedule`). Labels are the text (`hard`, as published) or the base's own distribution on
it (`soft`, the default): with the latter the last layer begins at its optimum and is held there while the exits learn.

Cost: one forward and backward pass up to the highest exit that is on, and one product with the head for each; exits may
be trained and read on a reduced draft vocabulary (`d_vocab`), which on a small model is half of a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.config import allowed
from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.training import layerskip_schedule as schedule
from selfspec.training.batches import Batch
from selfspec.training.draft_vocab import read_draft_vocab
from selfspec.training.evaluate import Validation
from selfspec.training.layerskip_folder import save_layerskip
from selfspec.training.layerskip_stack import SkipStack
from selfspec.training.layerskip_validation import describe, validate_exits
from selfspec.training.losses import HeadLoss, head_loss, restrict
from selfspec.training.trainee import check_options


@dataclass
class LayerSkipOptions:
    """Layers are counted as exit layers: how many are run. `exits` null: every layer, as published."""

    exit_layer: int | None = None  # where the draft exits; null: a quarter of the layers
    exits: list[int] | None = None  # those with a loss, beside the last layer
    curriculum: str = "rotational"
    rotation: int = 4  # R: every R-th exit is on
    last_always: bool = True  # the last layer's loss at every step; false: in its turn, as published
    scale: str = "published"  # e(l); uniform: every exit counts the same
    e_scale: float = 1.0
    max_dropout: float = 0.1  # p_max, of the last layer
    from_scratch: bool = False  # dropout grows with time, S(t)
    labels: str = "soft"
    lora_rank: int | None = 8  # null: train all weights
    lora_rank_below: int | None = None  # of the layers below exit_layer; null: the same
    lora_alpha: int = 8  # the product of the factors is scaled by lora_alpha / sqrt(rank)
    draft_vocab: str | None = None  # a file made by make_data.py; exits predict the first d_vocab of its ids only
    d_vocab: int | None = None
    validate_exits: list[int] | None = None  # reported beside exit_layer
    seed: int = 0


class LayerSkipTrainee:
    """The adapted target in training; `at_step` tells it which step it is, for everything that follows a schedule."""

    feature_layers: tuple[int, ...] = ()

    def __init__(self, target: Target, options: LayerSkipOptions, token_ids: Tensor | None) -> None:
        self.target, self.options, self.token_ids = target, options, token_ids
        last = target.num_layers
        self.exit_layer: int = options.exit_layer or max(1, last // 4)
        exits = options.exits or range(1, last)
        self.exits = [*sorted(set(exits)), last]
        e = schedule.exit_scales(last, options.e_scale)
        self.scales = [1.0 if options.scale == "uniform" else e[layer - 1] for layer in self.exits]
        ranks = None
        if options.lora_rank is not None:
            below = options.lora_rank_below or options.lora_rank
            ranks = [below if layer < self.exit_layer else options.lora_rank for layer in range(last)]
        self.stack = SkipStack(target, ranks, options.lora_alpha, options.seed)
        self.place_V: Tensor | None = None
        if token_ids is not None:
            self.place_V = torch.full((target.vocab_size,), -1, device=token_ids.device)
            self.place_V[token_ids] = torch.arange(len(token_ids), device=token_ids.device)
        self.module: nn.Module = self.stack.trained
        self.reported = sorted({self.exit_layer, *(options.validate_exits or ())})
        self._step, self._steps = 0, 1

    def at_step(self, step: int, steps: int) -> None:
        self._step, self._steps = step, steps

    def loss(self, batch: Batch, objective: HeadLoss = head_loss) -> Tensor:
        ids, logp = batch.teacher_ids_NK, batch.teacher_logp_NK
        if self.options.labels == "hard":  # all of p on the token that follows
            ids, logp = batch.labels_N[:, None], torch.zeros_like(logp[:, :1])
        whole = self.stack.head_VM, ids, logp
        of_exits = whole
        if self.place_V is not None:
            of_exits = self.stack.head_VM[self.token_ids], *restrict(ids, logp, self.place_V)
        on = [(layer, weight) for layer, weight in zip(self.exits, self.exit_weights(), strict=True) if weight > 0]
        states = self.stack.run(batch, [layer for layer, _ in on], self._dropped(batch))
        total = batch.weight_N.new_zeros(())
        for hidden_NM, (layer, weight) in zip(states, on, strict=True):
            labels = whole if layer == self.target.num_layers else of_exits
            total = total + weight * objective(hidden_NM, *labels, batch.weight_N)
        return total

    def exit_weights(self) -> list[float]:
        """ẽ(t, ·) of this step, over `self.exits`."""
        chosen = self.options
        on = schedule.exits_on(chosen.curriculum, len(self.exits), self._step, self._steps, chosen.rotation)
        on[-1] = on[-1] or chosen.last_always
        return schedule.loss_weights(on, self.scales)

    def validate(self, batches: Iterable[Batch], greedy: set[int]) -> Validation:
        return validate_exits(self.stack, batches, greedy, self.exit_layer, self.reported, self.token_ids)

    def save(self, folder: Path) -> None:
        save_layerskip(self.stack, self.target, folder, self.exit_layer, self.exits[:-1], self.token_ids)

    def describe(self, summary: dict[str, Any]) -> list[str]:
        """Lines for the card."""
        adapter, d_vocab = self.options.lora_rank is not None, self.options.d_vocab
        return describe(summary, self.target.name, self.exit_layer, adapter, d_vocab or self.target.vocab_size)

    def _dropped(self, batch: Batch) -> dict[int, Any] | None:
        chosen = self.options
        if chosen.max_dropout == 0:
            return None
        time_scale = schedule.time_scale(self._step, self._steps) if chosen.from_scratch else 1.0
        rates = schedule.dropout_rates(self.target.num_layers, chosen.max_dropout, time_scale)
        samples = [sample for sample in batch.document_BT.unique().tolist() if sample >= 0]
        return {sample: schedule.dropped(chosen.seed, self._step, sample, rates) for sample in samples}


def build_layerskip(target: Target, options: dict[str, Any]) -> LayerSkipTrainee:
    """UserError: unknown option, impossible exits, rates or ranks, a model type that cannot be trained."""
    check_options("layerskip", options, asdict(LayerSkipOptions()))
    chosen = LayerSkipOptions(**options)
    for name, layers in (
        ("exit_layer", [] if chosen.exit_layer is None else [chosen.exit_layer]),
        ("exits", chosen.exits or []),
        ("validate_exits", chosen.validate_exits or []),
    ):
        if impossible := [layer for layer in layers if not 1 <= layer < target.num_layers]:
            raise UserError(
                f"draft.{name}={impossible[0]} is not possible with {target.name}. Allowed: 1 to "
                f"{target.num_layers - 1}."
            )
    for name, choices in (("curriculum", schedule.CURRICULA), ("scale", schedule.SCALES), ("labels", ("soft", "hard"))):
        if getattr(chosen, name) not in choices:
            raise UserError(
                f"draft.{name}={getattr(chosen, name)!r} is unknown. {allowed(getattr(chosen, name), choices)}"
            )
    if not 0 <= chosen.max_dropout < 1:
        raise UserError(f"draft.max_dropout={chosen.max_dropout} is a rate: it must lie in [0, 1).")
    for name in ("rotation", "lora_rank", "lora_rank_below", "lora_alpha"):
        if (value := getattr(chosen, name)) is not None and value < 1:
            raise UserError(f"draft.{name}={value} must be at least 1.")
    if chosen.exits is not None and chosen.exit_layer is not None and chosen.exit_layer not in chosen.exits:
        raise UserError(
            f"draft.exit_layer={chosen.exit_layer} is not among draft.exits={chosen.exits}: it would not be trained."
        )
    num_exits = 1 + (len(set(chosen.exits)) if chosen.exits else target.num_layers - 1)
    if chosen.curriculum == "rotational" and not chosen.last_always and chosen.rotation > num_exits:
        raise UserError(
            f"draft.rotation={chosen.rotation} leaves steps without any of the {num_exits} exits (the last layer is "
            f"one): at most {num_exits}, or draft.last_always=true."
        )
    if chosen.e_scale < 0:
        raise UserError(f"draft.e_scale={chosen.e_scale} must not be negative.")
    if (chosen.draft_vocab is None) != (chosen.d_vocab is None):
        raise UserError("draft.draft_vocab (a file) and draft.d_vocab (how many of its ids) are given together.")
    token_ids: Tensor | None = None
    if chosen.draft_vocab is not None and chosen.d_vocab is not None:
        ids = read_draft_vocab(chosen.draft_vocab, chosen.d_vocab, target.eos_token_ids, target.fingerprint)
        token_ids = torch.from_numpy(ids).to(target.device)
    return LayerSkipTrainee(target, chosen, token_ids)
