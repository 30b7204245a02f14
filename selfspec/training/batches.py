"""Samples packed into rows of one fixed shape, and the batch of any step as a function of (seed, step).

Several samples share a row; positions restart at 0 and attention stops at each sample's edge, so packing changes no
number. Which samples meet in which batch depends on (seed, epoch) alone: a resumed run needs nothing but its step.

Label alignment: position t predicts token t+1. It is supervised when token t+1 belongs to the answer, so the last
prompt position is supervised (the first answer token always comes from the target) and no earlier one is.

Shape letters: B rows, T positions, N supervised positions (padded to few sizes), K kept target tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from selfspec.errors import UserError
from selfspec.training.data import Sample

PAD_TO = 256  # N is rounded up to this with weight-0 positions: few shapes, so kernels are built once


@dataclass(frozen=True)
class Teacher:
    """The target's distributions for one sample's answer: row i is what it predicts for answer token i."""

    ids_AK: np.ndarray  # int32, likeliest first
    logp_AK: np.ndarray  # float16


@dataclass(frozen=True)
class Batch:
    token_ids_BT: Tensor
    positions_BT: Tensor  # within the sample
    document_BT: Tensor  # which sample of the split; −1 is padding
    flat_N: Tensor  # supervised positions, as indices into B*T
    weight_N: Tensor  # 1, or 0 for padding of N
    labels_N: Tensor  # the answer token that follows
    document_N: Tensor
    teacher_ids_NK: Tensor
    teacher_logp_NK: Tensor
    features_BTF: Tensor | None = None  # the target's hidden states, for drafts that read them

    def attention_mask(self) -> Tensor:
        """Bool [B, 1, T, T], True where attending is allowed: same sample, not later. Padding attends to itself."""
        same = self.document_BT[:, :, None] == self.document_BT[:, None, :]
        return (same & torch.ones(same.shape[1:], dtype=torch.bool, device=same.device).tril())[:, None]

    def to(self, device: torch.device) -> Batch:
        present = {name: getattr(self, name) for name in self.__dataclass_fields__ if getattr(self, name) is not None}
        return Batch(**{name: tensor.to(device) for name, tensor in present.items()})


def pack(lengths: Sequence[int], order: Sequence[int], row_tokens: int, open_rows: int = 32) -> list[list[int]]:
    """First fit into the last `open_rows` rows, in the given order. Which samples lie in each row."""
    rows: list[list[int]] = []
    room: list[int] = []
    for sample in order:
        length = lengths[sample]
        if length > row_tokens:
            raise UserError(
                f"A sample of {length} tokens does not fit into rows of {row_tokens}. Raise train.row_tokens to at "
                f"least {max(lengths)}."
            )
        for row in range(max(0, len(rows) - open_rows), len(rows)):
            if room[row] >= length:
                break
        else:
            rows.append([])
            room.append(row_tokens)
            row = len(rows) - 1
        rows[row].append(sample)
        room[row] -= length
    return rows


class Batches:
    """Batches of one split: `at(step)` shuffles anew every epoch, `once()` goes through it in order."""

    def __init__(
        self,
        samples: Sequence[Sample],
        teachers: Sequence[Teacher],
        *,
        batch_rows: int,
        row_tokens: int,
        seed: int,
        device: torch.device | None = None,
        features: Sequence[Tensor] | None = None,
    ) -> None:
        """`features`: per sample `[tokens, F]`, for drafts that read the target's hidden states."""
        self.samples, self.teachers = samples, teachers
        self.batch_rows, self.row_tokens, self.seed = batch_rows, row_tokens, seed
        self.device = device or torch.device("cpu")
        self.features = features
        self.lengths = [len(sample.token_ids) for sample in samples]
        if not any(sample.answer_len > 0 and sample.prompt_len > 0 for sample in samples):
            raise UserError("No sample has an answer after a prompt: every label would be masked, nothing to learn.")
        self._epochs: dict[int, list[list[int]]] = {}
        self._places: list[tuple[int, int]] = []  # of the steps seen so far

    def at(self, step: int) -> Batch:
        """The batch of training step `step`; epochs follow each other, each in its own order."""
        epoch, row = self._place(step)
        return self._collate(self._rows(epoch)[row : row + self.batch_rows])

    def epoch(self, step: int) -> int:
        return self._place(step)[0]

    def _place(self, step: int) -> tuple[int, int]:
        """Epoch, and the first of its rows in this step."""
        while len(self._places) <= step:
            epoch, row = self._places[-1] if self._places else (0, -self.batch_rows)
            row += self.batch_rows
            self._places.append((epoch, row) if row < len(self._rows(epoch)) else (epoch + 1, 0))
        return self._places[step]

    def once(self) -> Iterator[Batch]:
        rows = pack(self.lengths, range(len(self.samples)), self.row_tokens)
        for begin in range(0, len(rows), self.batch_rows):
            yield self._collate(rows[begin : begin + self.batch_rows])

    def _rows(self, epoch: int) -> list[list[int]]:
        if epoch not in self._epochs:
            shuffled = np.random.Generator(np.random.Philox(key=[self.seed, epoch])).permutation(len(self.samples))
            self._epochs = {epoch: pack(self.lengths, shuffled.tolist(), self.row_tokens)}
        return self._epochs[epoch]

    def _collate(self, rows: list[list[int]]) -> Batch:
        shape = (self.batch_rows, self.row_tokens)
        token_ids, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        document = np.full(shape, -1, np.int64)
        flat, owner, ids, logp = [], [], [], []
        for row, members in enumerate(rows):
            begin = 0
            for member in members:
                sample, teacher = self.samples[member], self.teachers[member]
                end = begin + len(sample.token_ids)
                token_ids[row, begin:end] = sample.token_ids
                positions[row, begin:end] = np.arange(end - begin)
                document[row, begin:end] = member
                supervised = np.arange(begin + sample.prompt_len - 1, end - 1)
                flat.append(row * self.row_tokens + supervised)
                owner.append(np.full(len(supervised), member))
                ids.append(teacher.ids_AK)
                logp.append(teacher.logp_AK)
                begin = end
        features = None
        if self.features is not None:
            runs = [torch.cat([self.features[member] for member in members]) for members in rows]  # side by side
            features = torch.zeros(*shape, runs[0].shape[1], dtype=runs[0].dtype)
            for row, run in enumerate(runs):
                features[row, : len(run)] = run
        flat_N = np.concatenate(flat)
        padding = -len(flat_N) % PAD_TO

        def padded(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.concatenate([array, np.zeros((padding, *array.shape[1:]), array.dtype)]))

        labels = token_ids.reshape(-1)[flat_N + 1]
        return Batch(
            token_ids_BT=torch.from_numpy(token_ids),
            positions_BT=torch.from_numpy(positions),
            document_BT=torch.from_numpy(document),
            flat_N=padded(flat_N),
            weight_N=padded(np.ones(len(flat_N), np.float32)),
            labels_N=padded(labels),
            document_N=padded(np.concatenate(owner)),
            teacher_ids_NK=padded(np.concatenate(ids)).long(),
            teacher_logp_NK=padded(np.concatenate(logp)),
            features_BTF=features,
        ).to(self.device)
