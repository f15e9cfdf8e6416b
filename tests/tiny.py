"""Models small enough to be made anew, with random weights; ``byte_tokenizer`` is theirs too."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from scaled.records import Problem
from scaled.tiny_model import byte_tokenizer as byte_tokenizer

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
BOS, EOS = 256, 257


def make_tiny_model(family: str = "llama", tied: bool = True, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Two layers of width 16 in fp32. ``changes`` go to the configuration; ``initializer_range`` 0.02 makes every
    token about equally likely, 0.3 gives a policy that has preferences and looks at its context."""
    config, model = FAMILIES[family]
    settings = {
        "vocab_size": 258,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "tie_word_embeddings": tied,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": None,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model(config(**settings | changes)).eval()


def asked(*questions: str, answer_begun: str = "") -> list[Problem]:
    begun = ({"role": "assistant", "content": answer_begun},) if answer_begun else ()
    return [
        Problem(id=f"q{i}", messages=({"role": "user", "content": question}, *begun), answer="")
        for i, question in enumerate(questions)
    ]
