"""Where results go: files that are found good before anything is measured, and errors as lines of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import typer

from scaled.errors import UserError
from scaled.files import save_text
from scaled.interrupt import close_stdout


def start(command: Callable[..., None]) -> None:
    """Run a command of the terminal. What is wrong outside of it is told in a line without a traceback; exit 2."""
    try:
        typer.run(command)
    except UserError as error:
        fail(str(error).splitlines(), 2)
    except OSError as error:
        close_stdout()  # what it could not take must not be flushed once more
        text = str(error) if error.filename or not error.strerror else f"standard output: {error.strerror}"
        fail([" ".join(text.split())], 2)


def fail(messages: Iterable[str], code: int) -> None:
    """End with a line on standard error for each message."""
    for message in messages:
        print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


def check_target(file: Path | None) -> None:
    """Raise ``UserError`` where a file could not be saved in the end."""
    if file is None:
        return
    folder = file.absolute().parent
    if file.is_dir():
        raise UserError(f"{file} is a folder; name a file")
    if file.exists() and (not file.is_file() or _is_open(file)):
        raise UserError(f"{file} is no ordinary file, or takes the lines that are printed; name another")
    if not folder.is_dir():
        raise UserError(f"the folder of {file} does not exist")
    if not os.access(folder, os.W_OK):
        raise UserError(f"{folder} does not let files be made; name another folder for {file.name}")


def _is_open(file: Path) -> bool:
    """Whether standard output or standard error goes there: to replace the file would lose their lines."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.path.samestat(file.stat(), os.fstat(descriptor)):
                return True
    return False


def save(file: Path, text: str) -> None:
    """Write a file whole, and where its name is a link, what the link leads to. Raises ``UserError``."""
    save_text(file.resolve(), text)
