"""The two logs of a run, and what their rows must have: a log that was edited gets one clear error on reading."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from scaled.metrics import EVALUATION_FIELDS, UPDATE_FIELDS, JsonLines

LARGEST_COUNT = 10**15  # beyond it, an axis in floating point cannot tell neighbours apart
LARGEST = 1e300  # of what is summed; JSON allows numbers that no float holds
COUNTS = ("update", "batch")
ALWAYS = ("seconds", "peak_bytes")
SHARES = ("pass_at_1", "pass_at_k", "well_formed", "accuracy_of_well_formed", "problems", "samples", "macro_score")
TEXTS = ("method", "skipped", "eval", "kind", "id", "prompt", "text", "answer", "outcome", "stop_reason")
SAMPLE_FIELDS = (*COUNTS, "kind", "id", "prompt", "text", "answer", "reward", "outcome", "stop_reason", "tokens")
LATER = ("unparseable", "macro_score", "macro_score_interval", "by_source")  # older logs lack them
# All that a reader needs of a batch that gave no update.
SKIPPED_FIELDS = (*COUNTS, "skipped", "seconds", "peak_bytes")


def metrics_log(run: Path) -> JsonLines:
    """``metrics.jsonl`` of a run's folder."""
    return JsonLines(run / "metrics.jsonl", metrics_trouble)


def samples_log(run: Path) -> JsonLines:
    """``samples.jsonl`` of a run's folder."""
    return JsonLines(run / "samples.jsonl", lambda row: fields_trouble(row, SAMPLE_FIELDS))


def metrics_trouble(row: dict[str, Any]) -> str | None:
    """What keeps a row of ``metrics.jsonl`` from being read, or None."""
    wanted = EVALUATION_FIELDS if "eval" in row else SKIPPED_FIELDS if row.get("skipped") else UPDATE_FIELDS
    return fields_trouble(row, tuple(name for name in wanted if name in row or name not in LATER))


def fields_trouble(row: dict[str, Any], fields: tuple[str, ...]) -> str | None:
    """The first of the fields that is missing or of another type than it is written with, or None."""
    for name in fields:
        if name not in row:
            return f"the row has no `{name}`"
        value = row[name]
        if name in COUNTS:
            wanted, right = "a whole number from 0 to 10^15", type(value) is int and 0 <= value <= LARGEST_COUNT
        elif name in TEXTS:
            wanted, right = "a text", isinstance(value, str) or (value is None and name == "skipped")
        elif "interval" in name:
            pair = isinstance(value, list) and len(value) == 2 and all(map(_is_finite, value))
            wanted, right = "null or a pair of numbers", value is None or pair
        elif name == "by_source":
            known = isinstance(value, dict) and all(score is None or _is_finite(score) for score in value.values())
            wanted, right = "null or numbers by name", value is None or known
        elif name in ALWAYS:
            wanted, right = "a number", _is_finite(value)
        elif name in SHARES:
            wanted, right = "null or a number", value is None or _is_finite(value)
        else:
            wanted = "null or a number"
            right = value is None or _is_finite(value, sys.float_info.max) or value in ("NaN", "Infinity", "-Infinity")
        if not right:
            return f"`{name}` is {value!r:.60}, not {wanted}"
    return None


def _is_finite(value: Any, largest: float = LARGEST) -> bool:
    return type(value) in (int, float) and abs(value) <= largest
