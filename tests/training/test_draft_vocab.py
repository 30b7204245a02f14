"""The reduced draft vocabulary: ranked by what the target writes, never without an EOS, never of another target."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from selfspec.errors import UserError
from selfspec.training.batches import Teacher
from selfspec.training.draft_vocab import (
    count_draft_vocab,
    coverage,
    expected_counts,
    ranked_ids,
    read_draft_vocab,
    write_draft_vocab,
)
from selfspec.training.identity import target_identity

TEACHERS = [
    Teacher(np.array([[5, 7], [5, 9]], np.int32), np.log(np.array([[0.5, 0.25], [0.75, 0.125]])).astype(np.float16)),
    Teacher(np.array([[9, 2]], np.int32), np.log(np.array([[0.5, 0.25]])).astype(np.float16)),
]


def test_ids_are_ranked_by_expected_counts_with_eos_first():
    counts = expected_counts(TEACHERS, 12)
    np.testing.assert_allclose(counts[[5, 9, 7, 2]], [1.25, 0.625, 0.25, 0.25], rtol=2e-3)
    assert ranked_ids(counts, [3, 2]).tolist() == [2, 3, 5, 9, 7]
    assert coverage(np.array([5, 9]), TEACHERS) == pytest.approx(1.875 / 2.375, rel=2e-3)


def test_written_vocabulary_is_checked_when_read(tmp_path: Path):
    path = tmp_path / "v.safetensors"
    counts = expected_counts(TEACHERS, 12)
    write_draft_vocab(path, ranked_ids(counts, [2, 3]), counts, "abc")
    assert read_draft_vocab(path, 3, [2, 3], "abc").tolist() == [2, 3, 5]
    for args, match in (
        ((path, 1, [2, 3], "abc"), r"miss the EOS ids \[3\]"),
        ((path, 9, [2], "abc"), "Allowed: 1 to 5"),
        ((path, 3, [2], "xyz"), "fingerprint xyz|has xyz"),
        ((tmp_path / "none", 3, [2], "abc"), "Cannot read"),
    ):
        with pytest.raises(UserError, match=match):
            read_draft_vocab(*args)


def test_counting_a_data_folder_covers_its_own_text(chat_target, data_folder, tmp_path: Path):
    covered = count_draft_vocab(chat_target, data_folder(), tmp_path / "v.safetensors", num_kept=8)
    assert list(covered.values()) == sorted(covered.values()) and 0.5 < list(covered.values())[-1] <= 1.0
    fingerprint = target_identity(chat_target)["fingerprint"]
    assert 257 in read_draft_vocab(tmp_path / "v.safetensors", 5, [257], fingerprint)
