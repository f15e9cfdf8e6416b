"""Checkpoints: a Hugging Face folder and the run's state, there whole or not at all.

    checkpoints/update-000010/model/            for ``from_pretrained``
    checkpoints/update-000010/state/state.pt    tensors, numbers and strings
    checkpoints/update-000010/state/files.json  size and digest of every file, written last

A folder whose name starts with ``.partial-`` is being written or removed, or was when the machine stopped; one whose
name starts with ``.old-`` is whole and about to be replaced by one of the same update.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import logging as transformers_logging

from scaled.errors import UserError

if TYPE_CHECKING:  # seconds of importing that a reader of a log does without
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_NAME = re.compile(r"(?:\.old-)?update-(\d{6,})")
_STATE, _FILES = Path("state/state.pt"), Path("state/files.json")


def save_checkpoint(
    run: Path,
    update: int,
    *,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    state: dict[str, Any],
    keep_last: int,
) -> Path:
    """Save model and state as ``run/checkpoints/update-…`` and remove all but the last ``keep_last`` up to this one.

    ``state`` holds tensors, numbers, strings and None, in dicts, lists and tuples; anything else is a ``TypeError``
    that names the key. Whatever goes wrong while writing, a full disk for one, is a ``UserError``, and the
    checkpoints that were there stay as they were.
    """
    state = _plain(state, "state")
    folder = run / "checkpoints"
    target = folder / f"update-{update:06d}"
    partial = folder / f".partial-{target.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".partial-*"):
            shutil.rmtree(left, ignore_errors=True)
        (partial / "state").mkdir(parents=True)
        _save_model(model, partial / "model")
        tokenizer.save_pretrained(partial / "model")
        torch.save(state, partial / _STATE)
        _seal(partial)
        if target.exists():
            _remove(folder / f".old-{target.name}")
            target.rename(folder / f".old-{target.name}")
        partial.rename(target)
        _sync(folder)
    except Exception as error:  # a full disk has a class of its own in safetensors, in torch and in tokenizers
        shutil.rmtree(partial, ignore_errors=True)
        needed = sum(p.numel() * p.element_size() for p in model.parameters()) + _bytes(state)
        raise UserError(
            f"{target} could not be saved: {error}. It takes about {_size(needed)}, and "
            f"{_size(shutil.disk_usage(_existing(folder)).free)} are free. Make room, or move the run's folder to "
            f"another disk, then resume; {_name(latest_checkpoint(run))}."
        ) from error
    upto = [checkpoint for checkpoint in _checkpoints(run) if _number(checkpoint) <= update]
    kept = [checkpoint for checkpoint in upto if not checkpoint.name.startswith(".old-")][-keep_last:]
    for checkpoint in upto:
        if checkpoint not in kept:
            try:
                _remove(checkpoint)
            except OSError as error:  # the new one is saved: no reason to end a run
                logging.getLogger(__name__).warning("%s could not be removed: %s", checkpoint, error.strerror)
    return target


def latest_checkpoint(run: Path) -> Path | None:
    """The whole checkpoint of the highest update, or None."""
    return next(reversed(_checkpoints(run)), None)


def load_state(checkpoint: Path) -> dict[str, Any]:
    """The state of a checkpoint, on the CPU, after every file of it, the model's too, was compared with its digest.

    A file that is missing, cut short or changed is a ``UserError`` that names it and the checkpoint before this one.
    """
    name = _FILES
    try:
        if not (checkpoint / _FILES).is_file():
            raise ValueError("it is no ordinary file")
        listed = json.loads((checkpoint / _FILES).read_text())
        if not {_STATE.as_posix(), "model/config.json"} <= set(listed):
            raise ValueError("it does not list the files of a checkpoint")
        for name, (size, digest) in listed.items():
            found = (checkpoint / name).stat().st_size
            if found != size:
                raise ValueError(f"it has {found} bytes and was saved with {size}")
            if _digest(checkpoint / name) != digest:
                raise ValueError("its content is not what was saved")
        name = _STATE
        return torch.load(checkpoint / _STATE, weights_only=True, map_location="cpu")
    except Exception as error:  # torch.load alone raises a handful of classes for a file that is none of its own
        run = checkpoint.parent.parent
        older = [other for other in _checkpoints(run) if _number(other) < _number(checkpoint)]
        raise UserError(
            f"{checkpoint / name} is damaged: {error}. Move {checkpoint} out of the way; "
            + (f"the run then resumes from {older[-1]}." if older else "it is the only one: start the run anew.")
        ) from error


def save_text(path: Path, text: str) -> None:
    """Write a text file whole: a reader, also after a crash, finds the old text or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        _sync(path.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(
            f"{path} cannot be written: {error.strerror}; it is as it was. Make room or choose another place."
        ) from error


def _save_model(model: PreTrainedModel, folder: Path) -> None:
    """``save_pretrained``, which refuses generation settings that ``from_pretrained`` took: those are written as is."""
    generation, bars = model.generation_config, transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # the run has its own on the screen
    try:
        model.generation_config = type(generation)()
        model.save_pretrained(folder)
    finally:
        model.generation_config = generation
        if bars:
            transformers_logging.enable_progress_bar()
    generation.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])


def _seal(folder: Path) -> None:
    """Note size and digest of every file, and see all of it to the disk."""
    mode = (folder / _STATE).stat().st_mode  # safetensors writes for its owner alone
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    listed = {path.relative_to(folder).as_posix(): (path.stat().st_size, _digest(path)) for path in files}
    (folder / _FILES).write_text(json.dumps(listed, indent=1))
    for path in files:
        path.chmod(mode)
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _remove(checkpoint: Path) -> None:
    """Remove a folder under a name that marks it as incomplete, so that half of it is never taken for a checkpoint."""
    if checkpoint.exists():
        partial = checkpoint.with_name(f".partial-{checkpoint.name.lstrip('.')}")
        checkpoint.rename(partial)
        shutil.rmtree(partial, ignore_errors=True)  # what is still open on a network disk goes at the next save


def _checkpoints(run: Path) -> list[Path]:
    """The whole checkpoints, oldest first; one that is being replaced stands before its successor."""
    found = [
        path
        for path in (run / "checkpoints").glob("*update-*")
        if _NAME.fullmatch(path.name) and (path / _FILES).exists()
    ]
    return sorted(found, key=lambda path: (_number(path), not path.name.startswith(".old-")))


def _number(checkpoint: Path) -> int:
    return int(_NAME.fullmatch(checkpoint.name).group(1))


def _plain(value: Any, key: str) -> Any:
    """The state in types that load without unpickling; tensors on the CPU and without the storage around a view."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        return value if whole else value.clone()
    if isinstance(value, dict):
        for name in value:
            if type(name) not in (str, int):
                raise TypeError(f"{key} has a key {name!r}; keys of a checkpoint's state are strings or integers")
        return {name: _plain(inner, f"{key}.{name}") for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(inner, f"{key}[{i}]") for i, inner in enumerate(value))
    # Exact types: a numpy number is a float to isinstance, and would be pickled as an object of numpy's.
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"{key} is a {type(value).__name__}; a checkpoint's state holds tensors, numbers and strings only")


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return 0
    return sum(_bytes(inner) for inner in value)


def _size(count: int) -> str:
    return f"{count / 2**20:.0f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


def _name(checkpoint: Path | None) -> str:
    return f"the last good checkpoint is {checkpoint}" if checkpoint else "there is no earlier checkpoint"
