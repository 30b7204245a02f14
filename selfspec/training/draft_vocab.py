"""A reduced draft vocabulary: which tokens the target really writes, likeliest first.

Counts are expected counts: at every answer position of the training split the target's kept probabilities are summed,
so a token counts although sampling happened to pick its neighbour. Some 70,000 positions then rank 8,192 tokens, where
the text itself would not even hold them all. Drafting from the first d_vocab ids is lossless (q has smaller support);
what it costs is the probability mass outside, reported as coverage on held-out text.

Every EOS id must be among them, or no answer's end could ever be drafted: they are placed first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.training.batches import Teacher
from selfspec.training.data import load_dataset, write_atomically
from selfspec.training.identity import target_identity
from selfspec.training.self_prompts import template_of
from selfspec.training.teacher import teachers_for


def count_draft_vocab(
    target: Target, folders: str | Path | Sequence[str | Path], path: Path, num_kept: int = 32
) -> dict[int, float]:
    """Count on the training split of the folders, write `path`; returns the held-out coverage of some sizes."""
    dataset = load_dataset(folders)
    template = template_of(target.tokenizer)
    identity = target_identity(target, template.before + template.after)
    teachers = teachers_for(target, dataset, identity, num_kept=num_kept)
    counts = expected_counts((teachers[sample.index] for sample in dataset.train), target.vocab_size)
    ids = ranked_ids(counts, target.eos_token_ids)
    write_draft_vocab(path, ids, counts, identity["fingerprint"])
    held_out = [teachers[sample.index] for sample in dataset.held_out]
    sizes = [size for size in (1024, 2048, 4096, 8192, 16384) if size < len(ids)] + [len(ids)]
    return {size: coverage(ids[:size], held_out) for size in sizes}


def expected_counts(teachers: Iterable[Teacher], vocab_size: int) -> np.ndarray:
    """Expected number of times each token is written, `[V]` float64."""
    counts = np.zeros(vocab_size)
    for teacher in teachers:
        mass = np.exp(teacher.logp_AK.astype(np.float64)).ravel()
        counts += np.bincount(teacher.ids_AK.ravel(), weights=mass, minlength=vocab_size)
    return counts


def ranked_ids(counts: np.ndarray, eos_ids: Iterable[int]) -> np.ndarray:
    """All token ids that were counted: EOS ids first, then by count, ties by id."""
    first = sorted(set(eos_ids))
    by_count = np.lexsort((np.arange(len(counts)), -counts))
    others = [int(i) for i in by_count if counts[i] > 0 and i not in first]
    return np.asarray([*first, *others], dtype=np.int64)


def coverage(ids: np.ndarray, teachers: Iterable[Teacher]) -> float:
    """Share of the target's kept probability that falls on `ids`."""
    inside, kept = 0.0, 0.0
    for teacher in teachers:
        mass = np.exp(teacher.logp_AK.astype(np.float64))
        inside += float(mass[np.isin(teacher.ids_AK, ids)].sum())
        kept += float(mass.sum())
    return inside / kept if kept else 0.0


def write_draft_vocab(path: Path, ids: np.ndarray, counts: np.ndarray, target_fingerprint: str) -> None:
    """`token_ids` int64, in order of rank, and their expected `counts`; the target's fingerprint as metadata."""
    tensors = {"token_ids": ids, "counts": counts[ids].astype(np.float32)}
    write_atomically(path, lambda partial: save_file(tensors, partial, metadata={"target": target_fingerprint}))


def read_draft_vocab(path: str | Path, d_vocab: int, eos_ids: Iterable[int], target_fingerprint: str) -> np.ndarray:
    """The first `d_vocab` ids, checked. UserError: damaged, of another target, too few ids, an EOS id missing."""
    try:
        with safe_open(path, framework="numpy") as file:
            ids, made_for = file.get_tensor("token_ids"), (file.metadata() or {}).get("target")
    except (SafetensorError, OSError) as error:
        raise UserError(f"Cannot read the draft vocabulary {path}: {error}.") from error
    if made_for != target_fingerprint:
        raise UserError(
            f"The draft vocabulary {path} was counted for the target with fingerprint {made_for}, this one has "
            f"{target_fingerprint}. Count one from this target's own text."
        )
    if not 1 <= d_vocab <= len(ids):
        raise UserError(f"d_vocab={d_vocab} is not available from {path}. Allowed: 1 to {len(ids)}.")
    chosen = ids[:d_vocab]
    if missing := sorted(set(eos_ids) - set(chosen.tolist())):
        raise UserError(f"The first {d_vocab} ids of {path} miss the EOS ids {missing}: no end could be drafted.")
    return chosen


def draft_vocabulary(target: Target, path: str | None, d_vocab: int | None) -> Tensor | None:
    """What draft.draft_vocab and draft.d_vocab ask for, int64 `[d_vocab]`; None: all tokens. UserError: see above."""
    if (path is None) != (d_vocab is None):
        raise UserError("draft.draft_vocab (a file) and draft.d_vocab (how many of its ids) are given together.")
    if path is None or d_vocab is None:
        return None
    return torch.from_numpy(read_draft_vocab(path, d_vocab, target.eos_token_ids, target.fingerprint))
