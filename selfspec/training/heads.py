"""Training prediction heads (Medusa, Hydra): every head on the target's soft labels, from the same hidden state.

Alignment: `selfspec.training.rounds`; head k gives draft k. Drafts are conditioned on the text's own tokens
(teacher-forced), which for the tokens of accepted drafts is exact.

Loss: Σ_k decay^k × the loss of head k (`selfspec.training.losses`), p renormalised on the draft vocabulary. With the
target's output matrix all heads go through it in one fused call.

Shape letters: N supervised positions (of the round's first draft), K heads, M width, T kept target tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.drafters.heads import linears
from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.training.batches import Batch
from selfspec.training.draft_folder import write_draft
from selfspec.training.draft_vocab import draft_vocabulary
from selfspec.training.evaluate import Validation
from selfspec.training.losses import CHUNK, HeadLoss, acceptance, head_loss, restrict
from selfspec.training.packed import reduced_head
from selfspec.training.rounds import Starts, starts_of
from selfspec.training.trainee import check_options


@dataclass
class HeadOptions:
    """draft_vocab: a file made by make_data.py, of which the first d_vocab ids can be drafted; null: all tokens.
    own_head: an output matrix for each head, beginning as the target's; else the target's own, frozen.
    prefix (hydra only): one more layer of the target's kind in front of the heads.
    """

    num_heads: int = 4
    num_blocks: int = 1
    own_head: bool = False
    prefix: bool = False
    decay: float = 0.8
    draft_vocab: str | None = None
    d_vocab: int | None = None


class HeadsTrainee:
    """`states(hidden_NM, batch, starts)` gives every head's state `[K, N, M]`, with gradients into `module`. The hidden
    states are those leaving the target's last layer, behind the final norm, or what a trained layer makes of them.
    """

    def __init__(
        self,
        kind: str,
        target: Target,
        options: HeadOptions,
        token_ids: Tensor | None,
        module: nn.Module,
        states: Callable[[Tensor, Batch, Starts], Tensor],
        prefix: Callable[[Batch], Tensor] | None = None,
    ) -> None:
        """prefix: the hidden states `[B, T, M]` that the heads read, where they are not the target's."""
        self.kind, self.target, self.options, self.token_ids = kind, target, options, token_ids
        self.feature_layers: tuple[int, ...] = (target.num_layers,)
        self.num_positions = options.num_heads
        self.module: nn.Module = module
        self.states, self.prefix = states, prefix
        self.head_VM, self.place_V = reduced_head(target, token_ids)
        self.own = linears(module.get_submodule("lm_head"))
        with torch.no_grad():
            for matrix in self.own:
                matrix.weight.copy_(self.head_VM)

    def loss(self, batch: Batch, objective: HeadLoss = head_loss) -> Tensor:
        starts = starts_of(batch, self.options.num_heads)
        states_KNM = self._states(batch, starts)
        decay_K1 = self.options.decay ** torch.arange(len(states_KNM), device=states_KNM.device)[:, None]
        weight_KN = starts.usable_KN * decay_K1.float()
        ids_NT, logp_NT = batch.teacher_ids_NK, batch.teacher_logp_NK
        if self.place_V is not None:
            ids_NT, logp_NT = restrict(ids_NT, logp_NT, self.place_V)
        if not self.own:
            label = starts.label_KN.flatten()
            return objective(states_KNM.flatten(0, 1), self.head_VM, ids_NT[label], logp_NT[label], weight_KN.flatten())
        total = weight_KN.new_zeros(())
        for states_NM, matrix, label_N, weight_N in zip(states_KNM, self.own, starts.label_KN, weight_KN, strict=True):
            total = total + objective(states_NM, matrix.weight, ids_NT[label_N], logp_NT[label_N], weight_N)
        return total

    @torch.inference_mode()
    def validate(self, batches: Iterable[Batch], greedy: set[int]) -> Validation:
        result = Validation(self.options.num_heads)
        for batch in batches:
            starts = starts_of(batch, self.options.num_heads)
            by_start: dict[int, list[bool]] = {}  # n -> agreement by head
            for head, states_NM in enumerate(self._states(batch, starts)):
                at_N = starts.usable_KN[head].nonzero()[:, 0]
                alpha, agree = self._quality(batch, head, states_NM[at_N], starts.label_KN[head, at_N])
                if head == 0:
                    result.add_positions(alpha, agree)
                else:
                    result.add_alpha(head, alpha)
                for start, same in zip(at_N.tolist(), agree, strict=True):
                    by_start.setdefault(start, []).append(same)
            by_document: dict[int, list[list[bool]]] = {}
            documents = batch.document_N.tolist()
            for start in sorted(by_start):
                by_document.setdefault(documents[start], []).append(by_start[start])
            for document in sorted(greedy & set(by_document)):
                result.add_greedy_starts(by_document[document])
        return result

    def save(self, folder: Path) -> None:
        config = {
            "kind": self.kind,
            "num_heads": self.options.num_heads,
            "num_blocks": self.options.num_blocks,
            "own_head": self.options.own_head,
            "prefix": self.prefix is not None,
        }
        write_draft(folder, config, self.module, self.token_ids, self.target)

    def _states(self, batch: Batch, starts: Starts) -> Tensor:
        assert batch.features_BTF is not None
        if self.prefix is not None:
            hidden_NM = self.prefix(batch).flatten(0, 1)[starts.at_N]
        else:
            with torch.no_grad():
                hidden_NM = self.target.norm(batch.features_BTF.flatten(0, 1)[starts.at_N].to(self.target.dtype))
        return self.states(hidden_NM.float(), batch, starts).float()

    def _quality(self, batch: Batch, head: int, states_NM: Tensor, label_N: Tensor) -> tuple[list[float], list[bool]]:
        """α and greedy agreement against the target's whole (not renormalised) distribution."""
        head_VM = self.own[head].weight if self.own else self.head_VM
        alpha, agree = [states_NM.new_zeros(0)], [torch.zeros(0, dtype=torch.bool, device=states_NM.device)]
        for part in torch.arange(len(label_N), device=label_N.device).split(CHUNK):
            logits = (states_NM[part] @ head_VM.T).float()
            ids, logp = batch.teacher_ids_NK[label_N[part]], batch.teacher_logp_NK[label_N[part]]
            places = ids if self.place_V is None else self.place_V[ids]
            alpha.append(acceptance(logits, places.clamp(min=0), torch.where(places >= 0, logp.float(), -torch.inf)))
            agree.append(logits.argmax(-1) == places[:, 0])
        return torch.cat(alpha).tolist(), torch.cat(agree).tolist()


def read_options(kind: str, target: Target, options: dict[str, Any]) -> tuple[HeadOptions, Tensor | None]:
    """Options checked, and the draft vocabulary. UserError: an unknown option, an impossible number, a vocabulary of
    another target or without EOS, a target whose logits are more than a product with its output matrix.
    """
    names = [name for name in asdict(HeadOptions()) if kind == "hydra" or name != "prefix"]
    check_options(kind, options, names)
    typed = HeadOptions(**options)
    for name in ("num_heads", "num_blocks"):
        if getattr(typed, name) < 1:
            raise UserError(f"draft.{name}={getattr(typed, name)} must be at least 1.")
    if not 0 < typed.decay <= 1:
        raise UserError(f"draft.decay={typed.decay} must be above 0 and at most 1: head k's loss counts decay^k.")
    probe = torch.linspace(-9, 9, 3)
    finished = target.family.finish_logits(probe, target.config)
    if not typed.own_head and (
        not torch.equal(probe, finished) or getattr(target.head_module, "bias", None) is not None
    ):
        raise UserError(
            f"{target.name} scales its logits, caps them or adds a bias to them, so a head that only borrows its "
            "output matrix would learn something else. Give draft.own_head=true."
        )
    return typed, draft_vocabulary(target, typed.draft_vocab, typed.d_vocab)
