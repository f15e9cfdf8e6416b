"""``python -m validation``: the claims, a line each."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from scaled.errors import UserError
from validation.claim import Setting
from validation.ledger import claims, run
from validation.output import check_target, save, start
from validation.text import explanation, line, read_marked, rewrite, table

ON_ERRORS = Console(stderr=True)


def show_progress(items: Iterable, description: str) -> Iterable:
    """A bar on standard error while a long check runs, gone when it is done; nothing where that is no terminal."""
    return track(items, description, console=ON_ERRORS, transient=True, disable=not ON_ERRORS.is_terminal)


def main(
    chosen: Annotated[str | None, typer.Option("--claims", help="only these, for example C01,C13")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="smaller samples and fewer runs; under three minutes")] = False,
    seed: Annotated[
        int,
        typer.Option(
            "--seed",
            min=0,
            help="of the random numbers; any seed works, and C14, C24 and C25 keep fixed ones of their own",
        ),
    ] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the ledger there as JSON")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="write one page with plots there")] = None,
    readme: Annotated[
        Path | None,
        typer.Option("--readme", help="rewrite the claims table of that file; not with --claims or --quick"),
    ] = None,
) -> None:
    """Check each claim of the paper: the figure expected, the figure measured, the verdict. Exit 1 if any fails."""
    known = claims()
    names = list(known) if chosen is None else _names(chosen, known)
    if readme is not None:
        if chosen is not None or quick:
            raise UserError("--readme takes the whole ledger, in full: leave out --claims and --quick, or --readme")
        read_marked(readme, "claims")
    for file in (json_file, html_file, readme):
        check_target(file)
    models = Path(os.environ.get("LOGRA_MODELS", "models"))
    setting = Setting(seed=seed, quick=quick, models=models, track=show_progress)
    records = []
    for entry in run([known[name] for name in names], setting):
        records.append(entry.record())
        if json_file is not None:  # after every claim: the whole ledger takes its time
            text = json.dumps(records, indent=1, ensure_ascii=False, allow_nan=False)
            save(json_file, text + "\n")
        print(line(records[-1]), flush=True)
        if entry.verdict in ("fails", "differs"):
            print(explanation(records[-1]), flush=True)
        elif entry.measurement is not None and entry.measurement.note:
            print(f"     {entry.measurement.note}", flush=True)
    if html_file is not None:
        from validation.page import page  # matplotlib takes a second to import

        save(html_file, page(records))
    if readme is not None:
        rewrite(readme, "claims", table(records))
    counts = {verdict: sum(r["verdict"] == verdict for r in records) for verdict in ("holds", "differs", "fails")}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()), end="")
    print(f", {sum(r['verdict'] == 'not measured here' for r in records)} not measured here")
    sys.exit(1 if counts["fails"] else 0)


def _names(chosen: str, known: Collection[str]) -> list[str]:
    """The claims asked for, each once, in the order in which they were named."""
    names = list(dict.fromkeys(name.strip().upper() for name in chosen.split(",") if name.strip()))
    if not names:
        raise UserError(f"--claims names no claim; there are {', '.join(known)}")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(f"no claim is called {', '.join(unknown)}; there are {', '.join(known)}")
    return names


if __name__ == "__main__":
    start(main)
