"""Checkpoints: a Hugging Face folder and the run's state, there whole or not at all.

    checkpoints/update-000010/model/              for ``from_pretrained``
    checkpoints/update-000010/state/numbers.json  numbers and strings
    checkpoints/update-000010/state/*.safetensors tensors, each rank's part in a file, by torch.distributed.checkpoint
    checkpoints/update-000010/state/files.json    size and digest of every file, written last

A folder whose name starts with ``.partial-`` is being written or removed, or was when the machine stopped; one whose
name starts with ``.old-`` is whole and about to be replaced by one of the same update. As many ranks may read as like.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from transformers.utils import logging as transformers_logging

from scaled.errors import UserError
from scaled.files import digest, discard, existing, size, sync
from scaled.ranks import ALONE, Ranks, lost

if TYPE_CHECKING:  # seconds of importing that a reader of a log does without
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_NAME = re.compile(r"(?:\.old-)?update-(\d{6,})")
_NUMBERS, _FILES = Path("state/numbers.json"), Path("state/files.json")


def save_checkpoint(
    run: Path,
    update: int,
    *,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    weights: Iterable[tuple[str, Tensor]],
    tensors: dict[str, Tensor],
    numbers: dict[str, Any],
    keep_last: int,
    ranks: Ranks = ALONE,
) -> Path:
    """Save model and state as ``run/checkpoints/update-…`` and remove all but the last ``keep_last`` up to this one.

    ``weights`` are the model's, whole; ``tensors`` the state's, of which each rank writes what it has (DTensors);
    ``numbers`` are of the types of JSON, and anything else is a ``TypeError`` that names the key. Whatever goes wrong
    while writing, a full disk for one, is a ``UserError``, and the checkpoints that were there stay as they were.
    """
    numbers = _plain(numbers, "state")
    folder = run / "checkpoints"
    target = folder / f"update-{update:06d}"
    partial = folder / f".partial-{target.name}"
    needed = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *tensors.values()))
    try:
        with ranks.together():
            if ranks.first:
                _make_room(folder, partial)
        if tensors:  # in a folder that all ranks see
            _write(tensors, partial / "state", ranks)
        whole = {name: weight.cpu() for name, weight in weights if ranks.first}
        with ranks.together():
            if ranks.first:
                _save_model(model, whole, partial / "model")
                tokenizer.save_pretrained(partial / "model")
                (partial / _NUMBERS).write_text(json.dumps(numbers, indent=1), encoding="utf-8")
                _seal(partial)
                _put_in_place(partial, target)
    except Exception as error:  # a full disk has a class of its own in safetensors, in torch and in tokenizers
        if ranks.first:
            discard(partial)
        if lost(error):
            raise
        raise UserError(
            f"{target} could not be saved: {error}. It takes about {size(needed)}, and "
            f"{size(shutil.disk_usage(existing(folder)).free)} are free. {_remedy(run)}."
        ) from error
    if ranks.first:
        _remove_older(run, update, keep_last)
    return target


def latest_checkpoint(run: Path) -> Path | None:
    """The whole checkpoint of the highest update, or None."""
    return next(reversed(_checkpoints(run)), None)


def identity(checkpoint: Path) -> str:
    """What no other checkpoint has: the digest of the list of its files, and so of all of them."""
    return digest(checkpoint / _FILES)


def verify(checkpoint: Path) -> None:
    """Compare every file of a checkpoint, the model's and the state's, with its digest.

    A file that is missing, cut short or changed is a ``UserError`` that names it and the checkpoint before this one.
    """
    name = _FILES
    try:
        if not (checkpoint / _FILES).is_file():
            raise ValueError("it is no ordinary file")
        listed = json.loads((checkpoint / _FILES).read_text())
        if not {_NUMBERS.as_posix(), "model/config.json"} <= set(listed):
            raise ValueError("it does not list the files of a checkpoint")
        for name, (count, saved) in listed.items():
            found = (checkpoint / name).stat().st_size
            if found != count:
                raise ValueError(f"it has {found} bytes and was saved with {count}")
            if digest(checkpoint / name) != saved:
                raise ValueError("its content is not what was saved")
    except Exception as error:  # a list of another form raises by where it departs
        raise _damaged(checkpoint, name, error) from error


def load_numbers(checkpoint: Path) -> dict[str, Any]:
    """The numbers of a checkpoint's state. Raises as ``verify`` does, and for a file that holds none."""
    verify(checkpoint)
    try:
        numbers = json.loads((checkpoint / _NUMBERS).read_text(encoding="utf-8"))
        if not isinstance(numbers, dict):
            raise ValueError(f"it holds a {type(numbers).__name__}, not an object")
        return numbers
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(checkpoint, _NUMBERS, error) from error


def load_tensors(checkpoint: Path, into: dict[str, Tensor], ranks: Ranks = ALONE) -> None:
    """Read the tensors of a checkpoint's state, or each rank its part of them, into those given.

    Raises ``ValueError`` if the checkpoint's have other names or shapes.
    """
    reader = HuggingFaceStorageReader(checkpoint / "state")
    saved = {name: tuple(found.size) for name, found in reader.read_metadata().state_dict_metadata.items()}
    wanted = {name: tuple(tensor.shape) for name, tensor in into.items()}
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            raise ValueError(f"`{name}` is {saved.get(name)} there and {wanted.get(name)} here")
    if into:
        with _in_one_process_or_several():
            dcp.load(into, storage_reader=reader, no_dist=ranks.world == 1)


def _write(tensors: dict[str, Tensor], folder: Path, ranks: Ranks) -> None:
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    writer = HuggingFaceStorageWriter(folder, save_distributed=True)
    with _in_one_process_or_several():
        dcp.save(whole, storage_writer=writer, no_dist=ranks.world == 1)


@contextmanager
def _in_one_process_or_several() -> Iterator[None]:
    """torch warns that there is one process; what it raises for several is no ``Exception``."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise RuntimeError(f"{type(first).__name__}: {first}") from error


def _make_room(folder: Path, partial: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".partial-*"):
        discard(left)
    (partial / "state").mkdir(parents=True)


def _put_in_place(partial: Path, target: Path) -> None:
    old = target.with_name(f".old-{target.name}")
    if os.path.lexists(target):
        _remove(old)
        target.rename(old)
    partial.rename(target)
    sync(target.parent)


def _remove_older(run: Path, update: int, keep_last: int) -> None:
    upto = [checkpoint for checkpoint in _checkpoints(run) if update_of(checkpoint) <= update]
    kept = [checkpoint for checkpoint in upto if not checkpoint.name.startswith(".old-")][-keep_last:]
    for checkpoint in upto:
        if checkpoint not in kept:
            try:
                _remove(checkpoint)
            except OSError as error:  # the new one is saved: no reason to end a run
                logging.getLogger(__name__).warning("%s could not be removed: %s", checkpoint, error.strerror)


def _save_model(model: PreTrainedModel, weights: dict[str, Tensor], folder: Path) -> None:
    """``save_pretrained``, which refuses generation settings that ``from_pretrained`` took: those are written as is."""
    generation, bars = model.generation_config, transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # the run has its own on the screen
    try:
        model.generation_config = type(generation)()
        model.save_pretrained(folder, state_dict=weights)
    finally:
        model.generation_config = generation
        if bars:
            transformers_logging.enable_progress_bar()
    generation.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])


def _seal(folder: Path) -> None:
    """Note size and digest of every file, and see all of it to the disk."""
    mode = (folder / _NUMBERS).stat().st_mode  # safetensors writes for its owner alone
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    listed = {path.relative_to(folder).as_posix(): (path.stat().st_size, digest(path)) for path in files}
    (folder / _FILES).write_text(json.dumps(listed, indent=1))
    for path in files:
        path.chmod(mode)
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def _remove(checkpoint: Path) -> None:
    """Remove a folder under a name that marks it as incomplete, so that half of it is never taken for a checkpoint."""
    if os.path.lexists(checkpoint):  # also a link to nothing
        partial = checkpoint.with_name(f".partial-{checkpoint.name.lstrip('.')}")
        checkpoint.rename(partial)
        discard(partial)


def _damaged(checkpoint: Path, name: Path | str, error: Exception) -> UserError:
    older = [other for other in _checkpoints(checkpoint.parent.parent) if update_of(other) < update_of(checkpoint)]
    return UserError(
        f"{checkpoint / name} is damaged: {error}. Move {checkpoint} out of the way; "
        + (f"the run then resumes from {older[-1]}." if older else "it is the only one: start the run anew.")
    )


def _checkpoints(run: Path) -> list[Path]:
    """The whole checkpoints, oldest first; one that is being replaced stands before its successor."""
    found = [
        path
        for path in (run / "checkpoints").glob("*update-*")
        if _NAME.fullmatch(path.name) and (path / _FILES).exists()
    ]
    return sorted(found, key=lambda path: (update_of(path), not path.name.startswith(".old-")))


def update_of(checkpoint: Path) -> int:
    """The update whose weights a checkpoint has, by its name."""
    return int(_NAME.fullmatch(checkpoint.name).group(1))


def _plain(value: Any, key: str) -> Any:
    """The value in the types of JSON."""
    if isinstance(value, dict):
        for name in value:
            if type(name) is not str:
                raise TypeError(f"{key} has a key {name!r}; keys of a checkpoint's numbers are strings")
        return {name: _plain(inner, f"{key}.{name}") for name, inner in value.items()}
    if type(value) in (list, tuple):
        return [_plain(inner, f"{key}[{i}]") for i, inner in enumerate(value)]
    # Exact types: a numpy number is a float to isinstance.
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"{key} is a {type(value).__name__}; beside tensors a checkpoint holds numbers and strings only")


def _remedy(run: Path) -> str:
    if checkpoint := latest_checkpoint(run):
        return (
            "Make room, or move the run's folder to another disk, then resume; the last good checkpoint is "
            f"{checkpoint}"
        )
    return (
        f"Make room and remove {run}, or set run=FOLDER on another disk, and start anew; there is no earlier checkpoint"
    )
