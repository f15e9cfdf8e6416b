"""Ctrl-C and SIGTERM, taken at a safe point: never while weights change."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(Exception):
    """The run was asked to stop; raised between two steps of an update, whose batch will be taken again."""


def close_stdout() -> None:
    """After a broken pipe: what is still printed goes nowhere, and the interpreter's last flush raises nothing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class StopRequest:
    """Remembers the first signal; ``check`` raises ``Interrupted`` for it. A second Ctrl-C ends the process at once."""

    def __init__(self) -> None:
        self.requested = False

    def check(self) -> None:
        if self.requested:
            raise Interrupted

    def ask(self) -> None:
        self.requested = True

    @contextmanager
    def listening(self) -> Iterator[None]:
        signals = (signal.SIGINT, signal.SIGTERM)
        before = [signal.getsignal(number) for number in signals]
        for number in signals:
            signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in zip(signals, before, strict=True):
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
