"""``python -m validation.mutants``: breaks each formula of ``logra_ref`` in turn; shows what notices it, by value."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from xml.etree import ElementTree

import typer
import yaml

from scaled.errors import UserError
from validation.ledger import claims
from validation.output import check_target, fail, start
from validation.text import figures, read_marked, rewrite, row

ROOT = Path(__file__).parents[1]
COPIED = ("logra_ref", "scaled", "validation", "tests", "examples", "pyproject.toml")
ENTRIES = Path(__file__).with_suffix(".yaml")
STOPPED = "the check stopped"


@dataclass(frozen=True)
class Mutant:
    """``old`` stands once in ``logra_ref/file`` and becomes ``new``; claims are asked first, then unit tests."""

    name: str
    file: str
    old: str
    new: str
    claims: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()


def mutants(file: Path = ENTRIES) -> list[Mutant]:
    """All mutants. Raises ``UserError`` where the file does not hold them."""
    try:
        return [Mutant(**row) for row in yaml.safe_load(file.read_text(encoding="utf-8"))]
    except (OSError, TypeError, yaml.YAMLError) as error:
        raise UserError(f"{file}: {' '.join(str(error).split())}") from error


def faults(mutant: Mutant, known: Collection[str]) -> list[str]:
    """What is wrong with an entry, a line each: it could not be tried, or nothing could notice it."""
    texts = (mutant.name, mutant.file, mutant.old, mutant.new)
    if not all(isinstance(text, str) for text in texts):
        return [f"mutant {mutant.name}: name, file, old and new have to be texts"]
    found = []
    file = ROOT / "logra_ref" / mutant.file
    count = file.read_text(encoding="utf-8").count(mutant.old) if file.is_file() else None
    if count is None:
        found.append(f"there is no logra_ref/{mutant.file}")
    elif count != 1:
        found.append(f"its text stands {count} times in {mutant.file}, not once")
    if mutant.old == mutant.new:
        found.append("old and new are the same")
    if not mutant.claims and not mutant.tests:
        found.append("it names neither claims nor tests")
    found += [f"no claim is called {claim}" for claim in mutant.claims if claim not in known]
    found += [f"there is no {test}" for test in mutant.tests if not (ROOT / test).is_file()]
    return [f"mutant {mutant.name}: {fault}" for fault in found]


@dataclass(frozen=True)
class Outcome:
    """What noticed a mutant, and the figures it saw; ``by_value`` is false for one that lived or only crashed."""

    mutant: Mutant
    by_value: bool
    caught_by: str
    expected: str = ""
    measured: str = ""


def copy_to(folder: Path) -> None:
    """Copy the project as it is."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)


def trouble(asked: tuple[str, str]) -> str:
    """Why a claim or a file of tests says nothing about mutants: it fails without any. Empty where it is fit.

    ``asked`` is "claim" or "test", and which.
    """
    kind, name = asked
    with tempfile.TemporaryDirectory(prefix="unbroken-") as parent:
        folder = Path(parent)
        copy_to(folder)
        if kind == "claim":
            records, stopped = _ledger((name,), folder)
            seen = [f"{r['verdict']}: {r['reason']}" for r in records if r["verdict"] not in ("holds", "differs")]
        else:
            failed, stopped = _tests((name,), folder)
            seen = [f"{test}: {message}" for test, message in failed]
    why = [*seen, stopped] if stopped else seen
    return f"without any mutation {name} does not hold: {why[0]}" if why else ""


def try_mutant(mutant: Mutant) -> Outcome:
    """Break the formula in a copy, ask the claims that know it, and if they hold the unit tests."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        copy_to(folder)
        file = folder / "logra_ref" / mutant.file
        file.write_text(file.read_text(encoding="utf-8").replace(mutant.old, mutant.new), encoding="utf-8")
        crashed = ""
        records, stopped = _ledger(mutant.claims, folder)
        for record in records:
            if record["verdict"] != "fails":
                continue
            if record["reason"].startswith(STOPPED):
                crashed = f"{record['id']} ({record['reason']})"
                continue
            # Figures of the paper may be off without a mutation as well.
            off = next((c for c in record["comparisons"] if not c["fits"] and not c["from_paper"]), None)
            if off is not None:
                expected, measured, _ = figures(off)
                return Outcome(mutant, True, f"{record['id']}: {off['what']}", expected, measured)
        crashed = crashed or stopped
        failed, stopped = _tests(mutant.tests, folder)
        for test, message in failed:
            if message.startswith(("AssertionError", "assert")):
                return Outcome(mutant, True, test, measured=message)
            crashed = crashed or f"{test} ({message})"
        crashed = crashed or stopped
        return Outcome(mutant, False, f"only by an exception: {crashed}" if crashed else "NOTHING")


def _ledger(names: tuple[str, ...], folder: Path) -> tuple[list[dict], str]:
    """The records of the claims; and how the command ended, where not all have one."""
    if not names:
        return [], ""
    command = ["-m", "validation", "--quick", "--claims", ",".join(names), "--json", "ledger.json"]
    done = _run(command, folder)
    file = folder / "ledger.json"
    records = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    return records, "" if set(names) <= {record["id"] for record in records} else _end("validation", done)


def _tests(files: tuple[str, ...], folder: Path) -> tuple[list[tuple[str, str]], str]:
    """Name and message, in a line, of each test that fails; and how pytest ended, where it could not run them."""
    if not files:
        return [], ""
    done = _run(["-m", "pytest", "--junitxml", "tests.xml", *files], folder)
    report = folder / "tests.xml"
    failed = []
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        failed += [(case.get("name", ""), _first(failure.get("message", ""))) for failure in case.findall("failure")]
        for error in case.findall("error"):  # of a fixture, or of the import
            failed.append((case.get("name", ""), f"{_first(error.get('message', ''))}, {_last(error.text or '')}"))
    return failed, "" if report.exists() and done.returncode in (0, 1) else _end("pytest", done)


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "COLUMNS": "1000",  # errors stand in a line
        "OMP_NUM_THREADS": "1",
        "LOGRA_MODELS": str(ROOT / os.environ.get("LOGRA_MODELS", "models")),
    }
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, errors="replace"
    )


def _end(command: str, done: subprocess.CompletedProcess[str]) -> str:
    last = _last(done.stderr) or _last(done.stdout) or "nothing"
    return f"{command} ended with exit code {done.returncode} and printed last: {last}"


def _first(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _last(text: str) -> str:
    return _first("\n".join(reversed(text.splitlines())))


def table(outcomes: list[Outcome]) -> str:
    """The outcomes as a table in Markdown."""
    rows = ["| formula broken | noticed by | expected | measured |", "|---|---|---|---|"]
    for o in outcomes:
        rows.append(row(f"{o.mutant.name} (`{o.mutant.file}`)", o.caught_by, o.expected, o.measured))
    return "\n".join(rows)


def main(
    only: Annotated[str, typer.Option(help="mutants whose name holds this text")] = "",
    readme: Annotated[
        Path | None, typer.Option(help="rewrite the table of mutants of that file; not with --only")
    ] = None,
) -> None:
    """Exit 1 unless every mutant is noticed by a wrong value, and what is asked holds without any."""
    entries = mutants()
    chosen = [mutant for mutant in entries if only in str(mutant.name)]
    if not chosen:
        raise UserError(f"no mutant's name holds “{only}”")
    if readme is not None:
        if only:
            raise UserError("--readme takes all mutants: leave out --only, or --readme")
        read_marked(readme, "mutants")
        check_target(readme)
    known = claims()
    wrong = [fault for mutant in entries for fault in faults(mutant, known)]
    if wrong:
        raise UserError("\n".join(wrong))
    asked = [("claim", claim) for mutant in chosen for claim in mutant.claims]
    asked += [("test", test) for mutant in chosen for test in mutant.tests]
    outcomes = []
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        try:
            unfit = [text for text in pool.map(trouble, dict.fromkeys(asked)) if text]
            if unfit:
                fail(unfit, 1)
            for outcome in pool.map(try_mutant, chosen):
                outcomes.append(outcome)
                seen = f": expected {outcome.expected}, measured {outcome.measured}" if outcome.expected else ""
                verdict = "noticed" if outcome.by_value else "LIVES  "
                print(f"{verdict}  {outcome.mutant.name} → {outcome.caught_by}{seen}", flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)  # nobody waits for the others
            raise
    if readme is not None:
        rewrite(readme, "mutants", table(outcomes))
    lives = sum(not outcome.by_value for outcome in outcomes)
    print(f"{len(outcomes) - lives} of {len(outcomes)} broken formulas are noticed by a wrong value")
    sys.exit(1 if lives else 0)


if __name__ == "__main__":
    start(main)
