"""What the tests of checkpoints share: names of what is there, a full disk, equality to the bit."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader

from scaled.checkpoint import load_numbers, load_tensors, save_checkpoint
from scaled.sharding import gathered


def save_state(run: Path, update: int, model, tokenizer, state: dict[str, Any], keep_last: int = 1) -> Path:
    """A checkpoint of the model with this state: tensors beside numbers."""
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return save_checkpoint(
        run,
        update,
        model=model,
        tokenizer=tokenizer,
        weights=gathered(model),
        tensors=tensors,
        numbers={name: value for name, value in state.items() if name not in tensors},
        keep_last=keep_last,
    )


def load_state(checkpoint: Path) -> dict[str, Any]:
    """The state that ``save_state`` was given."""
    numbers = load_numbers(checkpoint)
    saved = HuggingFaceStorageReader(checkpoint / "state").read_metadata().state_dict_metadata
    tensors = {name: torch.empty(found.size, dtype=found.properties.dtype) for name, found in saved.items()}
    load_tensors(checkpoint, tensors)
    return numbers | tensors


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file can grow beyond ``room`` bytes: writing fails as it does on a full disk, in every library."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python would cut what it caches of modules imported meanwhile, and not notice.
    cached, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = cached


def same(left, right) -> bool:
    """Equal in type, structure and every bit."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and pickle_bytes(left) == pickle_bytes(right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and (left == right or repr(left) == repr(right))


def pickle_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
