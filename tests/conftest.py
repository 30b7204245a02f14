"""What every test shares: one thread, the marks `gpu` and `real_model`, and the tiny models as fixtures."""

from __future__ import annotations

import os

# Before torch and tokenizers are imported. No test may reach a tracker's server or a model hub by accident.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

from pathlib import Path

import pytest
import torch

import tiny_models
from selfspec.cache import storage


def pytest_configure(config: pytest.Config) -> None:
    # One thread: sums in a fixed order, and workers of pytest-xdist that do not fight for cores.
    torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="needs a CUDA device; none here")
    for item in items:
        if item.get_closest_marker("gpu"):  # not item.keywords: they hold the names of folders, too
            item.add_marker(no_gpu)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The folder of the real SmolLM2-135M, fetched once. Without network and cache the test is skipped, and says so."""
    from selfspec.errors import UserError
    from selfspec.target.fetch import fetch_smollm2

    try:
        return fetch_smollm2()
    except UserError as error:
        if "Could not download" not in str(error):
            raise  # a corrupt download or a damaged cache is a failure, not a reason to skip
        pytest.skip(f"REAL MODEL NOT TESTED: SmolLM2-135M is neither cached nor to be fetched here: {error}")


@pytest.fixture(autouse=True)
def _real_model_is_there(request: pytest.FixtureRequest) -> None:
    """`@pytest.mark.real_model` is enough to have the model fetched first, whatever the test does to load it."""
    if request.node.get_closest_marker("real_model"):
        request.getfixturevalue("smollm2_dir")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of more than 64 tokens are run in several chunks, as those of more than 512 are outside of tests."""
    monkeypatch.setattr(storage, "CHUNKS_CPU", storage.Chunks(most=64, between_rounds=64, step=16))


@pytest.fixture
def tiny_llama():
    """The factory itself: `tiny_llama(dtype=torch.float64, tied=True)`."""
    return tiny_models.tiny_llama


@pytest.fixture(params=sorted(tiny_models.FAMILIES))
def tiny_family(request: pytest.FixtureRequest) -> str:
    """Each family's name in turn, for `tiny_models.tiny_model(tiny_family, ...)`."""
    return request.param
