"""A model for engines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.tiny import byte_tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 with heads of a size that vLLM's CPU kernels have."""
    folder = tmp_path_factory.mktemp("engine") / "model"
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=300, num_hidden_layers=2, max_position_embeddings=256, **sizes)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
