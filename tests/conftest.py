"""What holds for every test: shapes of ``logra_ref`` checked at run time, one thread, no network, a real model."""

from __future__ import annotations

import os
from pathlib import Path

import jaxtyping
import pytest

ROOT = Path(__file__).parents[1]

# Before any import of torch, transformers or logra_ref: they read these, or are hooked, only then.
os.environ["LOGRA_MODELS"] = str(ROOT / os.environ.get("LOGRA_MODELS", "models"))  # tests change the current folder
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
jaxtyping.install_import_hook("logra_ref", "beartype.beartype")

import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)  # memory that nobody wrote is NaN as well, so reading it shows

settings.register_profile("quick", deadline=None, derandomize=True, max_examples=30)
settings.register_profile("full", deadline=None, max_examples=500, print_blob=True)
settings.load_profile("quick")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast ones first: what needs several processes, or an engine, comes last."""
    items.sort(key=lambda item: [part in item.path.parts for part in ("engine", "ranks")])


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The folder of the pretrained SmolLM2-135M-Instruct; not to be changed."""
    from scaled.model import resolve_model  # not at the top: tests of logra_ref need not wait for transformers

    return Path(resolve_model("smollm2"))
