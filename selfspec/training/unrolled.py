"""Training-time test (EAGLE-3, Li et al. 2025): a layer that reads its own output, unrolled over the steps of a draft.

Step j at text position p stands for the j-th draft of a round that began at p. It reads the output of step j−1 at the
same p and the embedding of token p+1+j (the text's own: teacher-forced), sits at rotary position p+j, and attends to
the step-0 keys up to p, made from true features, and to its own chain's later keys: exactly what a drafter's cache
holds in that round. So one pass over known text trains all rounds that could begin in it (`selfspec.training.rounds`).

The text's keys and values are wanted at every position; queries, what is behind attention, and all of the later steps
only where a round begins: prompts, often half of the text, cost a small part of a step each.

Memory: one [B, H, S, T] score matrix per step.

Shape letters: B rows, T positions, S slots (positions where a round begins), H heads, G kv heads, D head dim, M width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec.target import Target
from selfspec.training.batches import Batch
from selfspec.training.evaluate import Validation
from selfspec.training.losses import CHUNK, HeadLoss, acceptance, restrict
from selfspec.training.rounds import Slots, slots_of, starts_of

Step = tuple[Tensor, Tensor, Tensor]  # hidden states [N, M] at the supervised positions, those (flat), teacher rows


class Unrollable(Protocol):
    """A draft's layer, cut where attention is."""

    @property
    def head_dim(self) -> int: ...

    def enter(
        self, embedded_BTM: Tensor, hidden_BTM: Tensor, positions_BT: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rotated queries `[B, T, H, D]`, rotated keys and values `[B, T, G, D]`, and the residual `[B, T, M]`."""

    def leave(self, residual_BTM: Tensor, attended_BTHD: Tensor) -> Tensor:
        """What is behind attention, up to the output `[B, T, M]`."""


def unroll(
    layer: Unrollable,
    hidden_BTM: Tensor,
    embedded: Sequence[Tensor],
    positions_BT: Tensor,
    seen_BTT: Tensor,
    slots: Slots,
    window: int | None = None,
) -> list[Tensor]:
    """The layer's output `[B, S, M]` after each step, at the slots.

    hidden: what step 0 reads; embedded: as `embedded_steps` gives them; seen: which step-0 keys each query may see
    (bool), of those at most `window` positions behind the step's own.
    """
    query, key, value, residual_BTM = layer.enter(embedded[0], hidden_BTM, positions_BT)
    repeat = query.shape[2] // key.shape[2]
    query, residual_BSM = slots.of(query), slots.of(residual_BTM)
    text_key, text_value = key.repeat_interleave(repeat, dim=2), value.repeat_interleave(repeat, dim=2)
    positions_BS, seen_BST = slots.of(positions_BT), slots.of(seen_BTT)
    chain: list[tuple[Tensor, Tensor]] = []  # keys and values of the later steps so far, one per query head
    outputs: list[Tensor] = []
    for j in range(len(embedded)):
        if j > 0:
            query, key, value, residual_BSM = layer.enter(embedded[j], outputs[-1], positions_BS + j)
            chain.append((key.repeat_interleave(repeat, dim=2), value.repeat_interleave(repeat, dim=2)))
        visible_BST = seen_BST
        if window is not None:
            visible_BST = seen_BST & (positions_BS[:, :, None] + j - positions_BT[:, None] < window)
        scores = torch.einsum("bshd,bthd->bhst", query, text_key)
        scores = scores.masked_fill(~visible_BST[:, None], -torch.inf)
        own = [torch.einsum("bshd,bshd->bhs", query, k)[..., None] for k, _ in chain]
        weights = torch.softmax(torch.cat([scores, *own], -1).float() * layer.head_dim**-0.5, dim=-1)
        weights = weights.to(text_value.dtype)
        width = scores.shape[-1]
        attended = torch.einsum("bhst,bthd->bshd", weights[..., :width], text_value)
        for i, (_, v) in enumerate(chain):
            attended = attended + weights[..., width + i].transpose(1, 2)[..., None] * v
        outputs.append(layer.leave(residual_BSM, attended))
    return outputs


def rotate(heads_BTHD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
    """Rotary position embedding in the half-split form, as Llama's."""
    left, right = heads_BTHD.chunk(2, -1)
    turned = heads_BTHD * cos_BTD[:, :, None] + torch.cat([-right, left], -1) * sin_BTD[:, :, None]
    return turned.to(heads_BTHD.dtype)


def behind_attention(layer: Any, residual_BTM: Tensor, attended_BTHD: Tensor) -> Tensor:
    """Output projection, residuals and feed-forward of a Llama-like layer."""
    hidden_BTM = residual_BTM + layer.self_attn.o_proj(attended_BTHD.flatten(-2))
    output: Tensor = hidden_BTM + layer.mlp(layer.post_attention_layernorm(hidden_BTM))
    return output


@torch.no_grad()
def draw_weights(module: nn.Module, seed: int) -> None:
    """Matrices from a normal distribution of width 0.02, half of that where they write into the residual."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02, generator=generator)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(0.5)


def embedded_steps(target: Target, batch: Batch, num_steps: int, slots: Slots) -> list[Tensor]:
    """Embeddings of the tokens p+1+j for every step j, in float32: `[B, T, M]` of step 0, `[B, S, M]` of the others."""
    next_ids_BT = F.pad(batch.token_ids_BT, (0, num_steps))
    with torch.no_grad():
        first = target.embed(next_ids_BT[:, 1 : 1 + batch.token_ids_BT.shape[1]]).float()
        later = [target.embed(next_ids_BT.gather(1, slots.at_BS + 1 + j)).float() for j in range(1, num_steps)]
    return [first, *later]


def supervised_steps(states: Callable[[Batch, Slots], Sequence[Tensor]], batch: Batch, num_steps: int) -> list[Step]:
    """Of each step's states `[B, S, M]`, made where rounds begin, those whose draft is an answer token."""
    starts = starts_of(batch, num_steps)
    slots, slot_N = slots_of(starts, batch)
    steps = []
    for hidden_BSM, usable_N, label_N in zip(states(batch, slots), starts.usable_KN, starts.label_KN, strict=True):
        rounds = usable_N.nonzero()[:, 0]
        steps.append((hidden_BSM.flatten(0, 1)[slot_N[rounds]], starts.at_N[rounds], label_N[rounds]))
    return steps


@dataclass
class ChainLoss:
    """What the steps of an unrolled draft are trained on and judged by: Σ_j decay^j × the loss of step j.

    norm: the draft's; head_VM: its output matrix, trained or frozen; place_V: each token's place in a reduced
    vocabulary, or −1 (p is renormalised on it for the loss, not for α).
    """

    norm: Callable[[Tensor], Tensor]
    head_VM: Tensor
    place_V: Tensor | None
    num_steps: int
    decay: float

    def loss(self, steps: Iterable[Step], batch: Batch, objective: HeadLoss) -> Tensor:
        total = batch.weight_N.new_zeros(())
        for j, (hidden_NM, _, rows) in enumerate(steps):
            ids, logp = batch.teacher_ids_NK[rows], batch.teacher_logp_NK[rows]
            if self.place_V is not None:
                ids, logp = restrict(ids, logp, self.place_V)
            weight = torch.ones(len(rows), device=hidden_NM.device)
            step = objective(self.norm(hidden_NM).float(), self.head_VM, ids, logp, weight)
            total = total + self.decay**j * step
        return total

    @torch.inference_mode()
    def validate(
        self, batches: Iterable[Batch], greedy: set[int], steps_of: Callable[[Batch], Iterable[Step]]
    ) -> Validation:
        result = Validation(self.num_steps)
        for batch in batches:
            by_start: dict[tuple[int, int], list[bool]] = {}  # (document, answer token) -> agreement by step
            first_of: dict[int, int] = {}
            for j, (hidden_NM, _, rows) in enumerate(steps_of(batch)):
                alpha, agree = self._quality(batch, hidden_NM, rows)
                if j == 0:
                    result.add_positions(alpha, agree)
                else:
                    result.add_alpha(j, alpha)
                documents, starts = batch.document_N[rows].tolist(), (rows - j).tolist()
                for document, start, same in zip(documents, starts, agree, strict=True):
                    first_of.setdefault(document, start)
                    by_start.setdefault((document, start), []).append(same)
            for document in sorted(greedy & set(first_of)):
                starts = sorted(start for d, start in by_start if d == document)
                result.add_greedy_starts([by_start[document, start] for start in starts])
        return result

    def _quality(self, batch: Batch, hidden_NM: Tensor, rows: Tensor) -> tuple[list[float], list[bool]]:
        """α and greedy agreement at the given positions, against the target's whole (not renormalised) distribution."""
        alpha, agree = [], []
        for part in torch.arange(len(rows), device=rows.device).split(CHUNK):
            logits = F.linear(self.norm(hidden_NM[part]), self.head_VM).float()
            ids, logp = batch.teacher_ids_NK[rows[part]], batch.teacher_logp_NK[rows[part]]
            places = ids if self.place_V is None else self.place_V[ids]
            alpha.append(acceptance(logits, places.clamp(min=0), torch.where(places >= 0, logp.float(), -torch.inf)))
            agree.append(logits.argmax(-1) == places[:, 0])
        return torch.cat(alpha).tolist(), torch.cat(agree).tolist()
