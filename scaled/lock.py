"""One training in a run's folder at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scaled.errors import UserError

LOCK = ".lock"


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold a run's folder. A ``UserError`` if another process does, or if the folder is not to be written in.

    The lock is the system's, on an empty file that stays, and goes with the process however that ends.
    """
    try:
        # Not inherited: worker processes that outlive a killed run must not hold it.
        descriptor = os.open(run / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(
            f"run folder {run} cannot be written in ({error.strerror}: {LOCK}); make it writable, or train in a copy"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"run folder {run} is in use: another process trains in it; wait for it, stop it, or set run=FOLDER"
            ) from error
        except OSError:  # a network disk without locks is no reason not to train
            pass
        yield
    finally:
        os.close(descriptor)


def require_idle(run: Path) -> None:
    """Raises ``UserError`` if another process trains in the folder; nothing is written."""
    if (run / LOCK).exists() and os.access(run / LOCK, os.W_OK):
        with locked(run):
            pass
