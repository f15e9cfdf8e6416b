"""Files and folders of a run: written whole, seen to the disk, removed without fuss."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from scaled.errors import UserError


def save_text(path: Path, text: str) -> None:
    """Write a text file whole: a reader, also after a crash, finds the old text or the new one."""
    save_lines(path, [text])


def save_lines(path: Path, lines: Iterable[str]) -> None:
    """The same for what comes piece by piece, and need not fit in memory; nothing is left if ``lines`` raises."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8", newline="") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync(path.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(
            f"{path} cannot be written: {error.strerror}; it is as it was. Make room or choose another place."
        ) from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(path: Path) -> str:
    """BLAKE2b of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def discard(partial: Path) -> None:
    """Remove whatever has the name; what is still open on a network disk goes at the next save."""
    if partial.is_dir() and not partial.is_symlink():
        shutil.rmtree(partial, ignore_errors=True)
    else:
        with suppress(OSError):
            partial.unlink()


def size(count: int) -> str:
    """A number of bytes for people."""
    if count >= 2**30:
        return f"{count / 2**30:.2f} GiB"
    return f"{count / 2**20:.0f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"


def existing(folder: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())
