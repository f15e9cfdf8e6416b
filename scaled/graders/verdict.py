"""What a grader says of one response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["right", "wrong", "unparseable", "failed"]


@dataclass(frozen=True)
class Verdict:
    """``credit`` is the grader's score in [0, 1], None where it failed; ``right`` is a credit of 1.

    ``unparseable``: no answer could be read from the response, credit 0. ``failed``: the grader gave no verdict, and
    ``reason`` says why.
    """

    outcome: Outcome
    credit: float | None
    reason: str = ""


RIGHT = Verdict("right", 1.0)
WRONG = Verdict("wrong", 0.0)


def unparseable(reason: str) -> Verdict:
    """No answer could be read from the response."""
    return Verdict("unparseable", 0.0, reason)


def failed(reason: str) -> Verdict:
    """The grader gave no verdict."""
    return Verdict("failed", None, reason)
