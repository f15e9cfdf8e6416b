"""The models of ``tests.tiny`` as fixtures, and a model to save."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from scaled.cli import main
from scaled.train import train
from tests.checkpoints import save_state
from tests.tiny import byte_tokenizer, make_tiny_model
from tests.training import settings


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


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="w1", pad_token="w2", chat_template="{{ messages }}"
    )


@pytest.fixture
def save(tmp_path, model, tokenizer):
    def save_update(update: int, state: dict | None = None, keep_last: int = 2) -> Path:
        state = {"update": update} if state is None else state
        return save_state(tmp_path, update, model, tokenizer, state, keep_last)

    return save_update


@pytest.fixture(scope="session")
def four(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four updates; not to be changed."""
    run = tmp_path_factory.mktemp("four") / "run"
    train(settings(tiny_model, run))
    return run


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def logra(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """``main`` as the shell calls it: exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["logra", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return (ended.value.code or 0, *capfd.readouterr())

    return call


@pytest.fixture
def recipe(tiny_model: Path, tmp_path: Path) -> Iterator[Path]:
    """A run of two updates by a model that is never right, and so takes steps without a signal."""
    threads = torch.get_num_threads()
    path = tmp_path / "tiny.yaml"
    settings = {
        "run": str(tmp_path / "run"),
        "updates": 2,
        "microbatch": 4,
        "threads": 1,
        "skip_without_signal": False,
        "model": {"path": str(tiny_model), "gradient_checkpointing": False},
        "data": {"task": "arithmetic", "held_out": 6},
        "rollout": {"prompts": 4, "max_new_tokens": 4, "stop": ["\n"]},
        "rewards": {"answer_pattern": r"-?\d+"},
        "logra": {"rank": 2},
        "control": {"positions": 8},
    }
    path.write_text(yaml.safe_dump(settings))
    yield path
    torch.set_num_threads(threads)
