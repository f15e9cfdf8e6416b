"""An engine's weights as files, a part by each of its workers, and the whole put together again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from scaled.errors import UserError

POSITIONS, ENTRIES = "positions|", "entries|"


def write_part(path: Path, parts: Mapping[str, tuple[Tensor, Tensor]]) -> Path:
    """Write positions in the whole weight, below 2^31, and the entries there, by canonical weight name.

    Raises ``UserError`` where that is not possible.
    """
    tensors = {}
    for name, (where, entries) in parts.items():
        tensors[POSITIONS + name] = where.to("cpu", torch.int32).contiguous()
        tensors[ENTRIES + name] = entries.cpu().contiguous()
    try:
        save_file(tensors, path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"an engine's weights cannot be written to {path}: {error}") from error
    return path


def read_export(paths: Iterable[Path], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The whole weights of these shapes, in the engine's dtype, from the parts of all its workers.

    Raises ``UserError`` if entries are missing or are none of the weight's, if workers that have the same entry have
    other bits of it, and for a file that cannot be read.
    """
    whole: dict[str, Tensor] = {}
    seen = {name: torch.zeros(math.prod(shape), dtype=torch.bool) for name, shape in shapes.items()}
    for path in paths:
        try:
            with safe_open(path, "pt") as file:
                for name in shapes.keys() & {key.removeprefix(ENTRIES) for key in file.keys()}:  # noqa: SIM118
                    where = file.get_tensor(POSITIONS + name).to(torch.int64)
                    _put(whole, seen, name, where, file.get_tensor(ENTRIES + name), path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read as a part of an engine's weights: {error}") from error
    for name, had in seen.items():
        if not had.all():
            raise UserError(f"the engine's workers lack {int((~had).sum()):,} of the {len(had):,} entries of {name}")
    return {name: whole[name].reshape(shape) for name, shape in shapes.items()}


def _put(
    whole: dict[str, Tensor], seen: dict[str, Tensor], name: str, where: Tensor, entries: Tensor, path: Path
) -> None:
    had = seen[name]
    if len(where) != len(entries) or (len(where) and not 0 <= int(where.min()) <= int(where.max()) < len(had)):
        raise UserError(f"{path} has other entries of {name} than those of its {len(had):,}")
    held = whole.setdefault(name, torch.zeros(len(had), dtype=entries.dtype))
    twice = had[where]
    if held.dtype != entries.dtype or not torch.equal(_bits(held[where][twice]), _bits(entries[twice])):
        raise UserError(f"the engine's workers disagree about {name}")
    held[where] = entries
    had[where] = True


def _bits(weight: Tensor) -> Tensor:
    """NaN is equal to itself as bits."""
    return weight.view(torch.uint8)
