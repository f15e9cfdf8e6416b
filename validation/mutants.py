"""``python -m validation.mutants``: breaks each formula of ``logra_ref`` in turn; shows what notices it, by value."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from xml.etree import ElementTree

import typer
import yaml

from validation.text import figures, rewrite, row

ROOT = Path(__file__).parents[1]
COPIED = ("logra_ref", "scaled", "validation", "tests", "examples", "pyproject.toml")
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


def mutants() -> list[Mutant]:
    """All mutants, from ``mutants.yaml``."""
    return [Mutant(**row) for row in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))]


@dataclass(frozen=True)
class Outcome:
    """What noticed a mutant, and the figures it saw; ``by_value`` is false for one that lived or only crashed."""

    mutant: Mutant
    by_value: bool
    caught_by: str
    expected: str = ""
    measured: str = ""


def mutated_copy(mutant: Mutant, folder: Path) -> None:
    """Copy the project to ``folder`` with one formula broken. Raises ``ValueError`` unless its text is there once."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    file = folder / "logra_ref" / mutant.file
    text = file.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise ValueError(
            f"mutant {mutant.name}: its text stands {text.count(mutant.old)} times in {mutant.file}, not once"
        )
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")


def try_mutant(mutant: Mutant) -> Outcome:
    """Break the formula in a copy, ask the claims that know it, and if they hold the unit tests."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        mutated_copy(mutant, folder)
        crashed = ""
        for record in _ledger(mutant.claims, folder):
            if record["verdict"] != "fails":
                continue
            if record["reason"].startswith(STOPPED):
                crashed = f"{record['id']} ({record['reason']})"
                continue
            off = next((c for c in record["comparisons"] if not c["fits"]), None)
            if off is not None:
                expected, measured, _ = figures(off)
                return Outcome(mutant, True, f"{record['id']}: {off['what']}", expected, measured)
        for test, message in _tests(mutant.tests, folder):
            if message.startswith(("AssertionError", "assert")):
                return Outcome(mutant, True, test, measured=message.splitlines()[0])
            crashed = crashed or f"{test} ({message.splitlines()[0]})"
        return Outcome(mutant, False, f"only by an exception: {crashed}" if crashed else "NOTHING")


def _ledger(claims: tuple[str, ...], folder: Path) -> list[dict]:
    if not claims:
        return []
    command = ["-m", "validation", "--quick", "--claims", ",".join(claims), "--json", "ledger.json"]
    _run(command, folder)
    file = folder / "ledger.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else []


def _tests(files: tuple[str, ...], folder: Path) -> Iterator[tuple[str, str]]:
    """Name and message of each test that fails."""
    if not files:
        return
    _run(["-m", "pytest", "--junitxml", "tests.xml", *files], folder)
    for case in ElementTree.parse(folder / "tests.xml").iter("testcase"):
        for failure in case.findall("failure"):
            yield f"{case.get('name')}", failure.get("message", "")


def _run(command: list[str], folder: Path) -> None:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "LOGRA_MODELS": str(ROOT / os.environ.get("LOGRA_MODELS", "models")),
    }
    subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True)


def table(outcomes: list[Outcome]) -> str:
    """The outcomes as a table in Markdown."""
    rows = ["| formula broken | noticed by | expected | measured |", "|---|---|---|---|"]
    for o in outcomes:
        rows.append(row(f"{o.mutant.name} (`{o.mutant.file}`)", o.caught_by, o.expected, o.measured))
    return "\n".join(rows)


def main(
    only: Annotated[str, typer.Option(help="mutants whose name holds this text")] = "",
    readme: Annotated[Path | None, typer.Option(help="rewrite the table of mutants of that file")] = None,
) -> None:
    """Exit 1 unless every mutant is noticed by a wrong value."""
    chosen = [mutant for mutant in mutants() if only in mutant.name]
    outcomes = []
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for outcome in pool.map(try_mutant, chosen):
            outcomes.append(outcome)
            seen = f": expected {outcome.expected}, measured {outcome.measured}" if outcome.expected else ""
            print(
                f"{'noticed' if outcome.by_value else 'LIVES  '}  {outcome.mutant.name} → {outcome.caught_by}{seen}",
                flush=True,
            )
    if readme is not None:
        rewrite(readme, "mutants", table(outcomes))
    lives = sum(not outcome.by_value for outcome in outcomes)
    print(f"{len(outcomes) - lives} of {len(outcomes)} broken formulas are noticed by a wrong value")
    sys.exit(1 if lives else 0)


if __name__ == "__main__":
    typer.run(main)
