"""The message of an update as files: each training rank writes its own rows, an engine reads them all.

``update-00000012.part-1-of-4.safetensors`` holds int8 levels and fp32 coefficients by canonical weight name, and in its
header what the projections are a function of. Nothing in it is pickled, and all of it is checked before it is used.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from logra_ref.projection import Kind
from logra_ref.sync import FactorMessage
from scaled.errors import UserError
from scaled.files import sync

FORMAT = "logra-factors/1"


class Header(BaseModel):
    """What a file says about itself."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    format: Literal["logra-factors/1"] = FORMAT
    run: str
    update: int
    base_seed: int
    kind: Kind
    rank: int
    part: int
    parts: int
    digest: str


@dataclass(frozen=True)
class Origin:
    """Whose message it is: the run, and which part of how many holds the rows of this file."""

    run: str
    part: int = 0
    parts: int = 1


def message_path(folder: Path, update: int, part: int, parts: int) -> Path:
    """Where a part of an update's message is."""
    return folder / f"update-{update:08d}.part-{part + 1}-of-{parts}.safetensors"


def write_message(folder: Path, message: FactorMessage, origin: Origin) -> str:
    """Write this part whole or not at all; its digest. Raises ``UserError`` where that is not possible."""
    digest = message.digest()
    header = Header(
        run=origin.run,
        update=message.update,
        base_seed=message.base_seed,
        kind=message.kind,
        rank=message.rank,
        part=origin.part,
        parts=origin.parts,
        digest=digest,
    )
    tensors = {f"levels|{name}": levels.contiguous() for name, levels in message.levels.items()}
    tensors |= {f"coefficients|{name}": c.contiguous() for name, c in message.coefficients.items()}
    path = message_path(folder, message.update, origin.part, origin.parts)
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file(tensors, partial, metadata={"logra": header.model_dump_json()})
        sync(partial)
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"the factors of update {message.update} cannot be written to {folder}: {error}") from error
    return digest


def joint_digest(digests: list[str]) -> str:
    """One digest for the parts together, in order."""
    return hashlib.sha256("|".join(digests).encode()).hexdigest()


def parts_of(folder: Path, update: int) -> list[Path]:
    """Where the parts of an update's message are, as the first of them says; ``UserError`` if that is missing."""
    first = sorted(folder.glob(f"update-{update:08d}.part-1-of-*.safetensors"))
    if len(first) != 1:
        raise UserError(
            f"{folder} has {len(first)} first parts of the factors of update {update}, not one; send it again"
        )
    parts = int(first[0].stem.rpartition("-")[2])
    return [message_path(folder, update, part, parts) for part in range(parts)]


def read_message(folder: Path, update: int, *, run: str, digest: str) -> FactorMessage:
    """The whole message of an update, rows of all parts one below the other.

    Raises ``UserError`` for a part that is missing, truncated, altered, another user's or another run's, and where all
    together are not what ``digest`` says.
    """
    paths = parts_of(folder, update)
    parts, read = len(paths), [_read_part(path, run) for path in paths]
    headers = [header for header, _ in read]
    said = {(header.update, header.base_seed, header.kind, header.rank, header.parts) for header in headers}
    if len(said) > 1 or (headers[0].update, headers[0].parts) != (update, parts):
        raise UserError(f"the parts of update {update} in {folder} disagree about what they are; send it again")
    if joint_digest([header.digest for header in headers]) != digest:
        raise UserError(f"the factors of update {update} in {folder} are not those that were announced; send it again")
    names = list(read[0][1].levels)
    if any(list(message.levels) != names for _, message in read):
        raise UserError(f"the parts of update {update} in {folder} are of different matrices; send it again")
    return FactorMessage(
        update,
        headers[0].base_seed,
        headers[0].kind,
        headers[0].rank,
        {name: torch.cat([message.levels[name] for _, message in read]) for name in names},
        {name: torch.cat([message.coefficients[name] for _, message in read]) for name in names},
    )


def _read_part(path: Path, run: str) -> tuple[Header, FactorMessage]:
    try:
        owner = path.lstat()
        if path.is_symlink() or owner.st_uid != os.getuid():
            raise UserError(f"{path} belongs to user {owner.st_uid}, not to {os.getuid()}, or is a link; refused")
        with safe_open(path, "pt") as file:
            header = Header.model_validate_json((file.metadata() or {}).get("logra", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 — no mapping
    except ValidationError as error:
        wrong = error.errors()[0]
        raise UserError(
            f"{path} has no header of {FORMAT} ({'.'.join(map(str, wrong['loc']))}: {wrong['msg']}); send it again, by "
            "the same version on both sides"
        ) from error
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read as an update's factors ({error}); send it again") from error
    if header.run != run:
        raise UserError(f"{path} is of run {header.run!r}, and this engine follows run {run!r}")
    levels, coefficients = _by_kind(path, tensors)
    for name, coefficient in coefficients.items():
        wanted = (torch.int8, (len(coefficient), header.rank), torch.float32, 1)
        if (levels[name].dtype, tuple(levels[name].shape), coefficient.dtype, coefficient.ndim) != wanted:
            raise UserError(f"{path} has no int8 factor with {header.rank} columns and fp32 coefficients for {name}")
    message = FactorMessage(header.update, header.base_seed, header.kind, header.rank, levels, coefficients)
    if message.digest() != header.digest:
        raise UserError(f"{path} was altered: its bytes do not have the digest in its header; send it again")
    return header, message


def _by_kind(path: Path, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {"levels": {}, "coefficients": {}}
    for key, tensor in tensors.items():
        kind, _, name = key.partition("|")
        if kind not in found:
            raise UserError(f"{path} holds a tensor {key!r}, which no update has; refused")
        found[kind][name] = tensor
    if found["levels"].keys() != found["coefficients"].keys():
        raise UserError(f"{path} has factors and coefficients of different matrices; refused")
    return found["levels"], found["coefficients"]
