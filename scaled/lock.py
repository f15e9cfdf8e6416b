"""One training in a run's folder at a time, and one evaluation in a file of answers."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from scaled.errors import UserError

LOCK = ".lock"


def locked(run: Path) -> AbstractContextManager[None]:
    """Hold a run's folder. A ``UserError`` if another process does, or if the folder is not to be written in."""
    return _held(
        run / LOCK,
        f"run folder {run}",
        "another process trains in it; wait for it, stop it, or set run=FOLDER",
        "make it writable, or train in a copy",
    )


def locked_answers(file: Path) -> AbstractContextManager[None]:
    """Hold a file of answers, by a lock beside it. A ``UserError`` as for a run's folder."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"no folder for the answers {file} ({error.strerror}); give --out FILE") from error
    return _held(
        file.with_name(f".{file.name}{LOCK}"),
        f"{file}",
        "another evaluation writes its answers there; wait for it, stop it, or give --out FILE",
        "make its folder writable, or give --out FILE",
    )


@contextmanager
def _held(lock: Path, what: str, in_use: str, unwritable: str) -> Iterator[None]:
    """The lock is the system's, on an empty file that stays, and goes with the process however that ends."""
    try:
        # Not inherited: worker processes that outlive a killed run must not hold it.
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(f"{what} cannot be written in ({error.strerror}: {lock.name}); {unwritable}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{what} is in use: {in_use}") from error
        except OSError:  # a network disk without locks is no reason not to go on
            pass
        yield
    finally:
        os.close(descriptor)


def require_idle(run: Path) -> None:
    """Raises ``UserError`` if another process trains in the folder; nothing is written."""
    if (run / LOCK).exists() and os.access(run / LOCK, os.W_OK):
        with locked(run):
            pass
