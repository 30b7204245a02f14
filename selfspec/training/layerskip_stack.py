"""The target's own layers, trainable, run over packed samples with layer dropout and read at several exits.

LoRA: the target's weights stay where they are, shared and frozen, and small factors are added to every linear layer of
every block (`peft`). Full: a float32 copy, all of it trained, embedding, norm and head included.

Shape letters: B rows, T positions, N supervised positions, M width, V vocabulary, L layers.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.target.views import module_view
from selfspec.training.batches import Batch
from selfspec.training.packed import TRAINABLE


class SkipStack:
    """Embedding, layers, final norm and head of the adapted model; `model` is what peft or transformers can save."""

    def __init__(self, target: Target, ranks: Sequence[int] | None, alpha: int, seed: int) -> None:
        """`ranks`: LoRA rank by layer; None: train everything."""
        family = target.family
        if target.config.model_type not in TRAINABLE or family.rotary is None:
            raise UserError(
                f"LayerSkip cannot train models of type {target.config.model_type!r} yet. Allowed: "
                f"{', '.join(TRAINABLE)}. The independent draft can be trained for every target."
            )
        view = module_view(target.hf_model, family.attention)
        if ranks is None:
            self.model: Any = copy.deepcopy(view).float().requires_grad_(True)
            causal_lm = self.model
        else:
            self.model = _with_lora(_frozen(view), family.layers, ranks, alpha, seed)
            causal_lm = self.model.get_base_model()
        self.model.eval()  # layer dropout is the only dropout
        self._embed: nn.Module = attrgetter(family.embed)(causal_lm)
        self._layers: list[Any] = list(attrgetter(family.layers)(causal_lm))
        self._norm: nn.Module = attrgetter(family.norm)(causal_lm)
        self._rotary: nn.Module = attrgetter(family.rotary)(causal_lm)
        self._head: Any = attrgetter(family.head)(causal_lm)
        self._windows, self._queries_per_group = target.windows, target.queries_per_group
        # a ParameterDict takes no dots; tied weights are named once
        trained = {name.replace(".", "/"): p for name, p in self.model.named_parameters() if p.requires_grad}
        self.trained: nn.Module = nn.ParameterDict(trained)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def head_VM(self) -> Tensor:
        weight: Tensor = self._head.weight
        return weight

    def logits(self, normed_NM: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Of these tokens, None: all."""
        head_VM = self.head_VM if token_ids is None else self.head_VM[token_ids]
        return functional.linear(normed_NM.to(head_VM.dtype), head_VM).float()

    def run(self, batch: Batch, exits: Sequence[int], dropped: dict[int, np.ndarray] | None = None) -> list[Tensor]:
        """The normed state at every exit (layers run, ascending), `[N, M]` float32, at the supervised positions.

        dropped: sample -> bool by layer; nothing above the last exit is run.
        """
        hidden_BTM = self._embed(batch.token_ids_BT)
        if torch.is_autocast_enabled(hidden_BTM.device.type):
            hidden_BTM = hidden_BTM.float()  # products in bfloat16, the residual stream in float32
        kept_LBT1 = None if dropped is None else _kept(batch, dropped, len(self._layers))
        masks = {window: self._mask(batch, window) for window in set(self._windows)}
        position_embeddings = self._rotary(hidden_BTM, batch.positions_BT)
        found = []
        for index in range(max(exits)):
            after_BTM = self._layers[index](
                hidden_BTM,
                attention_mask=masks[self._windows[index]],
                position_ids=batch.positions_BT,
                position_embeddings=position_embeddings,
            )
            hidden_BTM = after_BTM if kept_LBT1 is None else torch.where(kept_LBT1[index], after_BTM, hidden_BTM)
            if index + 1 in exits:
                found.append(self._norm(hidden_BTM).flatten(0, 1)[batch.flat_N].float())
        return found

    def _mask(self, batch: Batch, window: int | None) -> Tensor:
        """Bool `[B, 1, R*T, T]`: attention stays within each sample, and in the window if the layer has one."""
        mask_B1TT = batch.attention_mask()
        if window is not None:
            behind_BTT = batch.positions_BT[:, :, None] - batch.positions_BT[:, None, :]
            mask_B1TT = mask_B1TT & (behind_BTT < window)[:, None]
        return mask_B1TT.repeat(1, 1, self._queries_per_group, 1)  # as grouped_attention folds its queries


def _kept(batch: Batch, dropped: dict[int, np.ndarray], num_layers: int) -> Tensor:
    """Bool `[L, B, T, 1]`: M of every position's sample; padding keeps everything."""
    kept_LBT = np.ones((num_layers, *batch.document_BT.shape), bool)
    document_BT = batch.document_BT.cpu().numpy()
    for sample, layers in dropped.items():
        kept_LBT &= ~(layers[:, None, None] & (document_BT == sample))
    return torch.from_numpy(kept_LBT).to(batch.document_BT.device)[..., None]


def _frozen(view: nn.Module) -> nn.Module:
    """The view with parameters of its own over the same memory, so that freezing them leaves the target as it is."""
    aliases: dict[int, nn.Parameter] = {}
    for module in view.modules():
        module._parameters = {
            name: None if p is None else aliases.setdefault(id(p), nn.Parameter(p.detach(), requires_grad=False))
            for name, p in module._parameters.items()
        }
    return view


def _with_lora(model: nn.Module, layers: str, ranks: Sequence[int], alpha: int, seed: int) -> Any:
    """`model` inside a PeftModel with factors on every linear layer of every block; B = 0, so it begins as it was."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise UserError(
            "LayerSkip with LoRA needs peft: pip install 'selfspec[train]'. Or train all weights: draft.lora_rank=null."
        ) from error
    blocks: Any = attrgetter(layers)(model)
    linears = {name.rsplit(".")[-1] for name, m in blocks[0].named_modules() if isinstance(m, nn.Linear)}
    common = max(set(ranks), key=ranks.count)
    indices = {rank: [str(i) for i, of in enumerate(ranks) if of == rank] for rank in sorted({*ranks} - {common})}
    config = LoraConfig(
        r=common,
        lora_alpha=alpha,
        use_rslora=True,  # one α for every rank
        rank_pattern={rf"{re.escape(layers)}\.({'|'.join(which)})\..*": rank for rank, which in indices.items()},
        target_modules=sorted(linears),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's own, about names inside transformers
        torch.manual_seed(seed)
        return get_peft_model(model, config)
