"""Tasks of reasoning-gym, scored by their own scorers.

The scorers of some other tasks of the package evaluate the answer as Python (string_insertion, spiral_matrix,
binary_matrix, n_queens, …), so only those that were read are let through. Of the eight, codeio's parses JSON and
compares trees, and pool_matrix's reads numbers with numpy; the rest compare texts.
"""

from __future__ import annotations

import contextlib
import io
from functools import cache
from typing import Any

from scaled.graders.verdict import RIGHT, WRONG, Verdict, unparseable

SCORERS = (
    "codeio",
    "emoji_mystery",
    "manipulate_matrix",
    "pool_matrix",
    "rectangle_count",
    "sentence_reordering",
    "tsumego",
    "word_ladder",
)
FULL = 1 - 1e-9  # a score of 1, but for rounding


def grade(gold: str, text: str, cut: bool, metadata: dict[str, Any]) -> Verdict:
    """The task's own score of what stands in the last ``<answer>…</answer>``.

    The package's prompts ask for the tags, and its users score what ``extract_answer`` finds; without them there is
    no answer (taking the whole text would give partial credit for thinking aloud: tsumego's scorer pays 0.01 for any
    text). ``metadata`` has the task's name as ``dataset``, and as ``entry`` what the package made.
    """
    answer = _library().utils.extract_answer(text)
    if answer is None:
        return unparseable("no <answer>…</answer> in the response")
    try:
        credit = float(_scorer(metadata["dataset"])(answer, metadata["entry"]))
    except (ValueError, RecursionError):
        if metadata["dataset"] != "codeio":
            raise
        return WRONG  # it reads the answer as JSON, and this one has a number or a nesting without end
    if not 0 <= credit <= 1 + 1e-9:
        raise ValueError(f"the scorer of {metadata['dataset']} gave {credit}, which is outside [0, 1]")
    return RIGHT if credit >= FULL else Verdict("wrong", credit)


def prepare() -> None:
    """Import the package and read its data, which takes seconds, before the first answer's time begins."""
    for name in SCORERS:
        _scorer(name)


def fault(metadata: Any) -> str | None:
    """What is wrong with a row's metadata, if anything."""
    if not isinstance(metadata, dict) or not {"dataset", "entry"} <= metadata.keys():
        return "its `metadata` has no `dataset` and `entry`; write the file by `logra data`"
    if metadata["dataset"] not in SCORERS:
        return f"its task {metadata['dataset']!r} is not among those whose scorers run no answer: {', '.join(SCORERS)}"
    entry = metadata["entry"]
    if (
        not isinstance(entry, dict)
        or not isinstance(entry.get("answer"), str)
        or not isinstance(entry.get("metadata"), dict)
    ):
        return "its `metadata.entry` is not {question, answer, metadata} as reasoning-gym makes it"
    return None


@cache
def _library() -> Any:
    with contextlib.redirect_stdout(io.StringIO()):  # the package prints when it is imported
        import reasoning_gym
        import reasoning_gym.utils
    return reasoning_gym


@cache
def _scorer(name: str) -> Any:
    with contextlib.redirect_stdout(io.StringIO()):
        return _library().get_score_answer_fn(name)
