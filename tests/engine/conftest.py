"""A model for engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaled.model import fetch_model
from scaled.tiny_model import TINY


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 with heads of a size that vLLM's CPU kernels have."""
    return fetch_model(TINY, tmp_path_factory.mktemp("engine") / "model")
