"""The models of ``tests.tiny`` as fixtures."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests.tiny import byte_tokenizer, make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama with two layers; not to be changed."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, and two for the turns of a chat; not to be changed."""
    return byte_tokenizer()
