"""The ledger as lines of text and as the README's table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from scaled.errors import UserError
from validation.output import save


def number(value: float | None) -> str:
    """A figure with up to five significant digits; whole numbers whole."""
    if value is None:
        return "–"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.5g}"


def told_apart(value: float | None, other: float) -> str:
    """A figure in three significant digits, or as many more as it takes to print otherwise than another one."""
    if value is None or float(value).is_integer():
        return number(value)
    return next(
        f"{value:.{digits}g}"
        for digits in range(3, 18)
        if digits == 17 or f"{value:.{digits}g}" != f"{other:.{digits}g}"
    )


def figures(record: dict[str, Any]) -> tuple[str, str, str]:
    """Expected, measured and tolerance of a record or comparison, with unit and relation."""
    unit = f" {record['unit']}" if record["unit"] else ""
    relation = "" if record["relation"] == "=" else f"{record['relation']} "
    tolerance = "exact" if record["tolerance"] == 0 else f"± {number(record['tolerance'])}"
    return f"{relation}{number(record['expected'])}{unit}", f"{number(record['measured'])}{unit}", tolerance


def without(parts: list[str]) -> str:
    """What could not be measured here, to be put after a count or a verdict; nothing where all was."""
    return f"; not measured here: {', '.join(parts)}" if parts else ""


def line(record: dict[str, Any]) -> str:
    """One line for a claim."""
    start = f"{record['id']}  {record['verdict']:<17}  {record['statement']}"
    if not record["comparisons"]:
        return f"{start} | {record['reason']}"
    expected, measured, tolerance = figures(record)
    count = len(record["comparisons"])
    controls = "controls failed as they must" if record["control_failed"] else "A CONTROL DID NOT FAIL"
    fit = sum(c["fits"] for c in record["comparisons"])
    return (
        f"{start} | {record['what']}: expected {expected}, measured {measured}, tolerance {tolerance} | "
        f"{fit} of {count} figures fit, {controls}{without(record['not_measured'])} | {record['seconds']:.1f} s"
    )


def explanation(record: dict[str, Any]) -> str:
    """What a reader needs of a claim that fails or differs: each figure that is off, and how to repeat the check."""
    parts = [f"     {record['reason']}"] if record["reason"] and record["comparisons"] else []  # else the line has it
    for c in record["comparisons"]:
        if c["fits"] and c["control_failed"]:
            continue
        expected, measured, tolerance = figures(c)
        wrong = told_apart(c["control_measured"], c["expected"])
        parts += [
            f"     {c['what']}: expected {expected} ({c['oracle']}), measured {measured}, "
            f"tolerance {tolerance} ({c['reason']}); control ({c['control']}): {wrong}"
        ]
    return "\n".join([*parts, f"     seed {record['seed']}; repeat alone: {record['command']}"])


def row(*cells: str) -> str:
    """A row of a table in Markdown."""
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def table(records: list[dict[str, Any]]) -> str:
    """The claims as a table in Markdown."""
    rows = ["| | claim | expected | measured | tolerance | verdict |", "|---|---|---|---|---|---|"]
    for r in records:
        if r["comparisons"]:
            expected, measured, tolerance = figures(r)
            off = [c["what"] for c in r["comparisons"] if not c["fits"]]
            fit = f"{len(r['comparisons']) - len(off)} of {len(r['comparisons'])} figures"
            verdict = f"{r['verdict']} ({fit}{without(r.get('not_measured', []))})"
            verdict += f": {r['reason']}" if r["reason"] else ""
            cells = [f"{r['what']}: {expected}", measured, tolerance, verdict]
        else:
            cells = ["", "", "", f"{r['verdict']}: {r['reason']}"]
        rows.append(row(r["id"], f"{r['statement']} ({r['where']})", *cells))
    return "\n".join(rows)


def rewrite(file: Path, name: str, text: str) -> None:
    """Replace what stands between a file's marks ``<!-- name: …`` and ``<!-- end of name -->``, else ``UserError``."""
    save(file, _marks(name).sub(lambda marks: f"{marks[1]}{text}\n{marks[2]}", read_marked(file, name)))


def read_marked(file: Path, name: str) -> str:
    """A file's text. Raises ``UserError`` where it cannot be read or has no such marks."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not _marks(name).search(text):
        raise UserError(f"{file} has no lines <!-- {name}: … --> and <!-- end of {name} --> for a table between them")
    return text


def _marks(name: str) -> re.Pattern[str]:
    return re.compile(f"(<!-- {name}: [^\\n]*\\n).*?(<!-- end of {name} -->)", re.DOTALL)
