"""What Medusa and Hydra heads say they take is what their tensors take."""

from __future__ import annotations

import pytest
import torch
from head_drafts import random_heads
from live_tensors import bytes_in

from selfspec import wrap_target
from selfspec.decoding.rows import Rows
from selfspec.drafters.hydra import Hydra
from selfspec.drafters.medusa import Medusa
from tiny_models import tiny_llama

TARGET = wrap_target(tiny_llama(), name="tiny")


@pytest.mark.parametrize(
    "outputs", [{}, {"own_head": True}, {"d_vocab": 30}, {"own_head": True, "d_vocab": 30}], ids=str
)
@pytest.mark.parametrize(("kind", "made"), [("medusa", Medusa), ("hydra", Hydra)])
def test_their_memory_is_foretold(kind, made, outputs):
    heads, token_ids = random_heads(kind, TARGET, **outputs)
    drafter = made(TARGET, heads, token_ids)
    weights, state = drafter.draft_bytes(3, 100)
    rows = Rows(TARGET, 3, 100)
    drafter.start(rows)
    assert state == bytes_in(rows.draft_state) == 3 * TARGET.width * torch.float32.itemsize
    kept = bytes_in(drafter, without=TARGET)
    assert weights == pytest.approx(kept, rel=0.05)
