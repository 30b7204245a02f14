"""Half a million small objects come and go here; what the imports left is not worth looking through each time."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def _collect_only_what_is_new():
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
