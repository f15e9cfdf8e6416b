"""Runs the checks and gives each its verdict."""

from __future__ import annotations

import importlib
import math
import pkgutil
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import validation.checks
from validation.claim import REGISTRY, Claim, Measurement, NotMeasured, Setting

LARGEST = sys.float_info.max

Verdict = Literal["holds", "fails", "differs", "not measured here"]


@dataclass(frozen=True)
class Entry:
    """A line of the ledger. ``reason`` says why a claim was not measured, fails or differs."""

    claim: Claim
    verdict: Verdict
    setting: Setting
    measurement: Measurement | None = None
    reason: str = ""
    seconds: float = 0.0

    def command(self) -> str:
        """What repeats this check alone."""
        quick = " --quick" if self.setting.quick else ""
        return f"python -m validation --claims {self.claim.id} --seed {self.setting.seed}{quick}"

    def record(self) -> dict[str, Any]:
        """The line as JSON's types; the figures of the first comparison stand at the top as well."""
        comparisons = [asdict(c) | {"fits": c.fits, "control_failed": c.control_failed} for c in self._comparisons()]
        headline = comparisons[0] if comparisons else {}
        shown = ("what", "expected", "measured", "tolerance", "relation", "unit")
        record = {
            "id": self.claim.id,
            "statement": self.claim.statement,
            "where": self.claim.where,
            **{name: headline.get(name) for name in shown},
            "verdict": self.verdict,
            "control_failed": all(c["control_failed"] for c in comparisons) if comparisons else None,
            "reason": self.reason,
            "note": self.measurement.note if self.measurement else "",
            "not_measured": self.measurement.not_measured if self.measurement else [],
            "seed": self.setting.seed,
            "quick": self.setting.quick,
            "seconds": round(self.seconds, 2),
            "command": self.command(),
            "comparisons": comparisons,
            "data": self.measurement.data if self.measurement else {},
        }
        return _plain(record)

    def _comparisons(self) -> list[Any]:
        return self.measurement.comparisons if self.measurement else []


def claims() -> dict[str, Claim]:
    """All claims by id, in order: every module of `validation.checks` registers its own."""
    for module in pkgutil.iter_modules(validation.checks.__path__):
        importlib.import_module(f"validation.checks.{module.name}")
    return dict(sorted(REGISTRY.items()))


def run(chosen: list[Claim], setting: Setting) -> Iterator[Entry]:
    """The entry of each claim as soon as it is measured."""
    for one in chosen:
        yield measure(one, setting)


def measure(one: Claim, setting: Setting) -> Entry:
    """Make the check of a claim. An error in the check itself is a failure with its text, and stops no other."""
    start = time.perf_counter()
    try:
        found = one.check(setting)
    except NotMeasured as reason:
        return Entry(one, "not measured here", setting, reason=_one_line(reason))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"the check stopped: {type(error).__name__}: {_one_line(error)} ({where.filename}:{where.lineno})"
        return Entry(one, "fails", setting, reason=reason, seconds=time.perf_counter() - start)
    verdict, reason = judge(found)
    return Entry(one, verdict, setting, found, reason, time.perf_counter() - start)


def judge(found: Measurement) -> tuple[Verdict, str]:
    """A check holds if every figure fits and every control failed; figures of the paper alone may differ."""
    if not found.comparisons:
        return "fails", "the check compared nothing"
    toothless = [c for c in found.comparisons if not c.control_failed]
    if toothless:
        first = toothless[0]
        return (
            "fails",
            f"the control of “{first.what}” did not fail: {first.control} gives {first.control_measured:.6g}",
        )
    off = [c for c in found.comparisons if not c.fits]
    wrong = [c for c in off if not c.from_paper]
    if wrong:
        return "fails", f"{len(wrong)} of {len(found.comparisons)} figures do not fit, the first: {wrong[0].what}"
    if off:
        return "differs", found.note
    return "holds", ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _plain(value: Any) -> Any:
    """JSON's types: numpy's and torch's numbers as Python's; null for NaN, the largest number for infinities."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return None if math.isnan(value) else max(-LARGEST, min(LARGEST, value))
    return value
