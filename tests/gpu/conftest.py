"""The tapes as a fixture: rounds are recorded on the CPU as they are on CUDA."""

from __future__ import annotations

import pytest
from op_tape import TapeRecorder

from selfspec.decoding import graphs
from selfspec.decoding.sampler import Sampler
from selfspec.sampling import warpers


@pytest.fixture
def tapes(monkeypatch):
    """Rounds are recorded on the CPU as they are on CUDA; returns the recorders that were made."""
    made = []

    def recorder(device):
        made.append(TapeRecorder(device))
        return made[-1]

    def can_be_captured(rows, sampler):
        return type(sampler) is Sampler and not getattr(sampler.transforms, "processors", ())

    monkeypatch.setattr(graphs, "CudaRecorder", recorder)
    monkeypatch.setattr(graphs, "can_be_captured", can_be_captured)
    monkeypatch.setattr(warpers, "_sorted", lambda scores: scores.sort(dim=-1).values)  # the CPU's own goes by numpy
    return made
