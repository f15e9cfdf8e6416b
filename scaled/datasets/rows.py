"""What all data sets share: rows of a source, those of them that cannot be used, and the line that is written."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from rich.console import Console

from scaled.data import ROWS_SHOWN
from scaled.errors import UserError
from scaled.records import Problem


@dataclass(frozen=True)
class Row:
    """A row of a source: ``place`` says which, ``number`` counts from 0, ``fault`` why it has no ``value``."""

    place: str
    number: int
    value: Any = None
    fault: str = ""


@dataclass
class Faults:
    """Rows that cannot be used: all are counted, and the first are kept to be shown."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, place: str, reason: object) -> None:
        self.count += 1
        if len(self.first) < ROWS_SHOWN:
            self.first.append(f"{place}: {reason}")

    def extend(self, more: Faults) -> None:
        self.count += more.count
        self.first += more.first[: ROWS_SHOWN - len(self.first)]

    def text(self) -> str:
        """The count, and the first with place and reason, a line each."""
        more = [f"… and {self.count - len(self.first)} more"] if self.count > len(self.first) else []
        return "\n".join([f"rows that cannot be used, and are left out: {self.count}", *self.first, *more])

    def show(self) -> None:
        """Print them, if there are any, on standard error."""
        if self.count:
            Console(stderr=True, highlight=False).print(f"warning: {self.text()}", markup=False, soft_wrap=True)


def line(problem: Problem) -> str:
    """A problem as its line of a jsonl file."""
    row: dict[str, Any] = {
        "id": problem.id,
        "messages": list(problem.messages),
        "answer": problem.answer,
        "verifier": problem.verifier,
        "source": problem.source,
    }
    if problem.metadata:
        row["metadata"] = problem.metadata
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def library(name: str) -> ModuleType:
    """A package that only the data sets need. Raises ``UserError`` where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"{name.partition('.')[0]} is not installed ({error}); `make data` installs what the data sets need"
        ) from error
