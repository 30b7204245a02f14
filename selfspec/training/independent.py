"""The baseline draft: a small Llama of its own, with the target's tokenizer, distilled from the target's text.

Its (tied) embedding starts as the target's own, reduced to its width by a singular value decomposition: words that the
target treats alike begin alike, which is worth thousands of steps. With 128 numbers per word the 49,152 words of
SmolLM2 are most of its 7.3M parameters, and the head is most of a draft step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from selfspec.config import RandomShape, TargetConfig
from selfspec.drafters.independent import VOCABULARY, places
from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.target.loading import random_model
from selfspec.training.batches import Batch
from selfspec.training.data import write_atomically
from selfspec.training.draft_vocab import draft_vocabulary
from selfspec.training.evaluate import Validation
from selfspec.training.losses import HeadLoss, head_loss, restrict
from selfspec.training.trainee import check_options
from selfspec.training.validating import validate_chain


@dataclass
class IndependentShape:
    hidden_size: int = 128
    intermediate_size: int = 512
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    draft_vocab: str | None = (
        None  # a file made by make_data.py; the first d_vocab of its tokens have rows of their own
    )
    d_vocab: int | None = None
    seed: int = 0


class IndependentTrainee:
    """A `LlamaForCausalLM` trained to predict the target."""

    feature_layers: tuple[int, ...] = ()

    def __init__(self, model: nn.Module, target: Target, token_ids: Tensor | None = None) -> None:
        """token_ids: what the model's rows stand for, all but the last; None: the target's vocabulary."""
        self.module: nn.Module = model
        self._model: Any = model
        self.target, self.token_ids = target, token_ids
        self._row_V: Tensor | None = None
        self._place_V: Tensor | None = None
        if token_ids is not None:
            self._row_V = places(token_ids, target.vocab_size).to(target.device)
            self._place_V = torch.where(self._row_V < len(token_ids), self._row_V, -1)

    def loss(self, batch: Batch, objective: HeadLoss = head_loss) -> Tensor:
        ids, logp, head_VM = batch.teacher_ids_NK, batch.teacher_logp_NK, self._model.lm_head.weight
        if self._place_V is not None:
            ids, logp = restrict(ids, logp, self._place_V)
            head_VM = head_VM[:-1]
        return objective(self._hidden(batch), head_VM, ids, logp, batch.weight_N)

    def validate(self, batches: Iterable[Batch], greedy: set[int]) -> Validation:
        def logits_of(hidden_NM: Tensor) -> Tensor:
            logits_NV: Tensor = self._model.lm_head(hidden_NM)
            return logits_NV if self._place_V is None else logits_NV[:, :-1]

        return validate_chain(batches, greedy, self._hidden, logits_of, self._place_V)

    def save(self, folder: Path) -> None:
        weights = {name: tensor.to(torch.bfloat16) for name, tensor in self.module.state_dict().items()}
        weights.pop("lm_head.weight")  # tied
        self._model.config.dtype = torch.bfloat16
        self._model.save_pretrained(folder, state_dict=weights)
        if self.token_ids is not None:
            metadata, tensors = {"target": self.target.fingerprint}, {"token_ids": self.token_ids}
            write_atomically(folder / VOCABULARY, lambda partial: save_file(tensors, partial, metadata=metadata))
        elif self.target.tokenizer is not None:  # a model of its own, which any tool can load without the target
            self.target.tokenizer.save_pretrained(folder)

    def _hidden(self, batch: Batch) -> Tensor:
        hidden_BTM = self._model.model(
            input_ids=batch.token_ids_BT if self._row_V is None else self._row_V[batch.token_ids_BT],
            position_ids=batch.positions_BT,
            attention_mask=batch.attention_mask(),
            use_cache=False,
        ).last_hidden_state
        return hidden_BTM.flatten(0, 1)[batch.flat_N].float()


def build_independent(target: Target, options: dict[str, Any]) -> IndependentTrainee:
    """A fresh draft for `target`. Options are the fields of IndependentShape; UserError names an unknown one."""
    check_options("independent", options, asdict(IndependentShape()))
    shape = IndependentShape(**options)
    if shape.hidden_size % shape.num_heads or shape.num_heads % shape.num_kv_heads:
        raise UserError(
            f"draft.hidden_size={shape.hidden_size} must be a multiple of num_heads={shape.num_heads}, and that one of "
            f"num_kv_heads={shape.num_kv_heads}."
        )
    token_ids = draft_vocabulary(target, shape.draft_vocab, shape.d_vocab)
    config = TargetConfig(
        kind="random",
        family="llama",
        seed=shape.seed,
        shape=RandomShape(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            vocab_size=target.vocab_size if token_ids is None else len(token_ids) + 1,
            max_positions=target.max_positions,
            tie_word_embeddings=True,
        ),
    )
    model = random_model(config).float()
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(target.config, name, None) if token_ids is None else None  # rows, not tokens, without tokenizer
        setattr(model.config, name, value)
        setattr(model.generation_config, name, value)
    with torch.no_grad():
        start_VM = reduced_embedding(target.head_weight_VM, shape.hidden_size)
        if token_ids is not None:  # the row of all other tokens begins as their mean, which is near 0
            start_VM = torch.cat([start_VM[token_ids], start_VM.mean(0, keepdim=True)])
        model.lm_head.weight.copy_(start_VM)
    return IndependentTrainee(model, target, token_ids)


def reduced_embedding(weight_VM: Tensor, width: int, std: float = 0.02) -> Tensor:
    """The `width` leading principal directions of an embedding (exact, by its M×M Gram matrix), scaled to `std`."""
    weight = weight_VM.detach().to("cpu", torch.float32)
    weight = weight - weight.mean(0)
    _, vectors = torch.linalg.eigh((weight.T @ weight).double())  # ascending
    basis = vectors.flip(1)[:, :width].float()
    reduced = weight @ basis
    if reduced.shape[1] < width:
        reduced = torch.nn.functional.pad(reduced, (0, width - reduced.shape[1]))
    return reduced * (std / reduced.std())
