"""Where an engine finds the files that its trainer sends: in a folder that both have, or at the end of a wire."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from scaled.errors import UserError
from scaled.policy_sync.wire import Meeting, Wire, WireBroken, visit

WIDENED = ("F32", "BF16", "F16")


class Inbox(Protocol):
    """``factors`` is a folder with the parts of a message, for as long as the block lasts. ``weights`` are the files of
    all weights, each to be read before the next. Both raise ``UserError``."""

    @contextmanager
    def factors(self, files: Mapping[str, int]) -> Iterator[Path]: ...
    def weights(self, files: Mapping[str, int], model: str) -> Iterator[Path]: ...
    def close(self) -> None: ...


class SharedFolder:
    """The folder is the only place that updates are read from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise UserError(f"{folder}, where updates are to be written, is no folder")

    @contextmanager
    def factors(self, files: Mapping[str, int]) -> Iterator[Path]:
        yield self.folder

    def weights(self, files: Mapping[str, int], model: str) -> Iterator[Path]:
        """Of a Hugging Face folder, once all of it was found to be readable."""
        found = sorted(Path(model).glob("*.safetensors"))
        if not found:
            raise UserError(f"{model} has no safetensors to load weights from")
        for path in found:
            shapes_of(path)
        yield from found

    def close(self) -> None:
        """Nothing is held."""


class Wired:
    """Files come in the order in which they were announced, to a folder that is gone once they were read."""

    def __init__(self, meeting: Meeting, worker: int, device: torch.device, patience: float) -> None:
        """``worker`` counts from 0. Raises ``UserError`` if the trainer is not there."""
        if meeting.backend == "nccl" and device.type != "cuda":
            raise UserError("the trainer sends by NCCL, and this engine has no GPU; set engine.transport=folder")
        own = device if meeting.backend == "nccl" else torch.device("cpu")
        self.wire = Wire(meeting, worker + 1, visit(meeting), own, patience)

    @contextmanager
    def factors(self, files: Mapping[str, int]) -> Iterator[Path]:
        with TemporaryDirectory(prefix="logra-") as name:
            for file, size in files.items():
                self._receive(Path(name), file, size)
            yield Path(name)

    def weights(self, files: Mapping[str, int], model: str) -> Iterator[Path]:
        for file, size in files.items():
            with TemporaryDirectory(prefix="logra-") as name:
                yield self._receive(Path(name), file, size)

    def close(self) -> None:
        self.wire.close()

    def _receive(self, folder: Path, name: str, size: int) -> Path:
        if Path(name).name != name:
            raise UserError(f"the trainer sends a file {name!r}, which is no plain name; refused")
        try:
            self.wire.receive(size, folder / name)
        except (WireBroken, OSError) as error:
            self.wire.close()  # or the trainer would go on sending, to the other workers too
            raise UserError(f"{name} did not come whole from the trainer: {error}") from error
        return folder / name


def shapes_of(path: Path) -> dict[str, tuple[int, ...]]:
    """Of each tensor of a file. Raises ``UserError`` if it cannot be read, or some cannot be widened to fp32."""
    shapes = {}
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 — no mapping
                part = file.get_slice(name)
                if part.get_dtype() not in WIDENED:
                    raise UserError(f"{name} in {path} is {part.get_dtype()}, not one of {', '.join(WIDENED)}")
                shapes[name] = tuple(part.get_shape())
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read as weights: {error}") from error
    return shapes
