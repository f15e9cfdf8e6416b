"""DAPO-Math-7.5K, which the paper trains on, and MATH-500, which it evaluates on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from rich.console import Console
from rich.progress import Progress

from scaled.data import RowError, read_row
from scaled.datasets.rows import Faults, Row, line
from scaled.datasets.sources import files, rows
from scaled.errors import UserError
from scaled.files import save_lines
from scaled.records import Problem

DAPO_COUNT = 7500
MATH_COUNT = 500


def dapo_problem(row: Row) -> Problem:
    """A row of DAPO-Math-17k. Its prompt says how to write the answer, and is taken as it is.

    Raises ``RowError``.
    """
    value = _object(row)
    judged_by = value.get("reward_model")
    if not isinstance(judged_by, dict):
        raise RowError(f"`reward_model` is {shown(judged_by)}, not an object with `ground_truth`")
    if judged_by.get("ground_truth") is None:
        raise RowError("`reward_model.ground_truth` is missing")
    ours = {"messages": value.get("prompt"), "answer": judged_by["ground_truth"]}
    return read_row(ours | {"verifier": "math", "source": "dapo-math"}, f"dapo-math/{row.number}")


def math_problem(row: Row) -> Problem:
    """A row of MATH-500. The problem alone is the user's message: how to answer is for the model's chat template.

    (Qwen2.5-Math's asks for steps, and for the answer in a box.) Raises ``RowError``.
    """
    value = _object(row)
    for name in ("unique_id", "problem"):
        if not isinstance(value.get(name), str) or not value[name].strip():
            raise RowError(f"`{name}` is {shown(value.get(name))}, not a text")
    messages = [{"role": "user", "content": value["problem"]}]
    ours = {"id": f"math-500/{value['unique_id']}", "messages": messages, "answer": value.get("answer")}
    return read_row(ours | {"verifier": "math", "source": "math-500"}, "")


def _object(row: Row) -> dict[str, Any]:
    if row.fault:
        raise RowError(row.fault)
    if not isinstance(row.value, dict):
        raise RowError(f"the row is {shown(row.value)}, not an object")
    return row.value


def dapo_math(out: Path, source: str, console: Console, count: int = DAPO_COUNT) -> None:
    """Write the first rows of the source whose prompts differ, in its order; the key is the first message's content.

    The published file has each prompt about a hundred times: no more of it is read than is needed. Raises
    ``UserError``, and writes nothing, if there are fewer than ``count``.
    """
    found = rows(source, ("prompt", "reward_model"), "train")
    _write(out, source, found, dapo_problem, lambda problem: problem.messages[0]["content"], count, console)


def math_500(out: Path, source: str, console: Console, count: int = MATH_COUNT) -> None:
    """Write all problems. Raises ``UserError``, and writes nothing, if they are not ``count``."""
    found = rows(source, ("unique_id", "problem", "answer"), "test")
    _write(out, source, found, math_problem, None, count, console)


def _write(
    out: Path,
    source: str,
    found: Iterator[Row],
    convert: Callable[[Row], Problem],
    key: Callable[[Problem], str] | None,
    count: int,
    console: Console,
) -> None:
    """``key`` is that of duplicates, which are left out; without it every row has to be another problem."""
    _check(out, source)
    faults, seen = Faults(), {}
    read = 0

    def lines() -> Iterator[str]:
        nonlocal read
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
            bar = bars.add_task(out.name, total=count)
            for row in found:
                read += 1
                try:
                    problem = convert(row)
                    mark = key(problem) if key else problem.id
                    if mark in seen and not key:
                        raise RowError(f"its id is that of {seen[mark]} too")
                except RowError as error:
                    faults.add(row.place, error)
                    continue
                if mark in seen:
                    continue
                seen[mark] = row.place
                bars.update(bar, completed=len(seen))
                yield line(problem)
                if key and len(seen) == count:
                    break
        if len(seen) != count:
            what = "unique prompts" if key else "problems"
            told = f"\n{faults.text()}" if faults.count else ""
            raise UserError(
                f"{source} has {len(seen):,} {what} in {read:,} rows, and {count:,} are needed: "
                f"{_missing(count - len(seen))}; nothing was written. Give the data set as it is published{told}"
            )

    save_lines(out, lines())
    faults.show()
    console.print(f"{out}: {count:,} problems of {read:,} rows", soft_wrap=True)


def _missing(count: int) -> str:
    return f"{count:,} are missing" if count > 0 else f"{-count:,} are too many"


def _check(out: Path, source: str) -> None:
    if out.is_dir():
        raise UserError(f"{out} is a folder; name the jsonl file to write")
    if not out.parent.is_dir():
        raise UserError(f"there is no folder {out.parent}; make it, or name a file elsewhere")
    if Path(source).exists() and out.resolve() in {file.resolve() for file in files(source)}:
        raise UserError(f"{out} is a file of the source itself, and would be lost; name another file to write")
