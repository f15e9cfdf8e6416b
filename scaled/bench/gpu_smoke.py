"""Does training run on this GPU, how fast, and in how much memory? A look at each method before any real run.

    python -m scaled.bench.gpu_smoke
    python -m scaled.bench.gpu_smoke --updates 3 --methods logra --json smoke.json
    python -m scaled.bench.gpu_smoke --model tiny --tokens 64      # on a CPU, in seconds

A Qwen2 of the shape of Qwen2.5-1.5B with random weights (fp32; products in bf16; gradient checkpointing) takes
updates on made-up batches of two sequences. So it needs no network, no tokenizer, no engine and no data: torch 2.11
or newer, some transformers 5, and what else ``scaled`` imports. What is learned means nothing: the figures are seconds,
peak memory, α, and that every loss and every KL is finite. At most ten minutes; exit code 1 if anything is not finite.

It was never run on a GPU by its authors: on a CPU with ``--model tiny`` alone, by its test.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from scaled.bench.smoke_run import PHASES, RESPONSES, SHAPES, measure, settings
from scaled.build import METHODS
from scaled.errors import UserError
from scaled.model import resolve_device

SECONDS = 600  # for all methods together


def smoke(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure every method in turn, each in a fresh process. A method that fails does not keep the rest from it."""
    device = resolve_device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    found: dict[str, Any] = {
        "device": name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": options.model,
        "tokens": RESPONSES * options.tokens,
        "methods": {},
    }
    started = perf_counter()
    for method in options.methods:
        console.print(f"{method}: {options.updates} updates on {name}")
        job = [sys.executable, "-m", "scaled.bench.gpu_smoke", "--measure", method, "--device", str(device)]
        job += ["--model", options.model, "--updates", str(options.updates), "--tokens", str(options.tokens)]
        left = max(SECONDS - (perf_counter() - started), 1)
        try:  # what it says on stderr is seen at once
            done = subprocess.run(job, stdout=subprocess.PIPE, text=True, timeout=left)
            trouble = f"exit code {done.returncode}; its own message is above" if done.returncode else None
        except subprocess.TimeoutExpired:
            trouble = f"not done when the {SECONDS} seconds for all methods were over; try fewer --updates"
        failed = {"finite": False, "trouble": trouble, "updates": 0}
        found["methods"][method] = failed if trouble else json.loads(done.stdout.splitlines()[-1])
    return found


def show(found: dict[str, Any], console: Console) -> None:
    """Print a row for each method."""
    title = f"{found['model']} on {found['device']}, {found['tokens']} tokens an update, medians without the first"
    table = Table(
        "method", *(f"{phase}, s" for phase in PHASES), "peak, GiB", "α", "realised KL", "finite", title=title
    )
    for method, row in found["methods"].items():
        if not row["updates"]:
            table.add_row(method, *["" for _ in range(6)], "no")
            continue
        alphas = [alpha for alpha in row["alpha"] if alpha is not None]
        table.add_row(
            method,
            *(f"{row['seconds'][phase]:.3f}" for phase in PHASES),
            f"{row['peak_bytes'] / 2**30:.2f}",
            f"{statistics.median(alphas):.3g}" if alphas else "",
            f"{statistics.median(row['realised_kl']):.2e}",
            "yes" if row["finite"] else "no",
        )
    console.print(table)
    for method, row in found["methods"].items():
        if row["trouble"]:
            console.print(f"{method}: {row['trouble']}", style="red", markup=False, soft_wrap=True)


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns 1 if anything was not finite or did not run."""
    options = _parse(arguments)
    if options.measure:
        config = settings(options.measure, options.model, options.updates, options.device)
        print(json.dumps(measure(config, options.model, options.tokens)))
        return 0
    console = Console(highlight=False)
    found = smoke(options, console)
    show(found, console)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0 if all(row["finite"] for row in found["methods"].values()) else 1


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scaled.bench.gpu_smoke",
        description="Seconds, peak memory and α of some updates of each method, on random weights and made-up batches.",
    )
    parser.add_argument("--model", choices=SHAPES, default="1.5b", help="the shape of Qwen2.5-1.5B, or tiny, for a CPU")
    parser.add_argument("--updates", type=_at_least(1), default=10)
    parser.add_argument(
        "--tokens", type=_at_least(2), default=4096, help=f"of each of the {RESPONSES} sequences of a batch"
    )
    parser.add_argument("--methods", type=_methods, default=list(METHODS), help="some of " + ",".join(METHODS))
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, …")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures there")
    parser.add_argument("--measure", choices=METHODS, help=argparse.SUPPRESS)  # this is the process of one method
    return parser.parse_args(arguments)


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a number of {least} or more")
        return int(text)

    return number


def _methods(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in METHODS]:
        raise argparse.ArgumentTypeError(f"no method {unknown[0]!r}; there are {', '.join(METHODS)}")
    return names


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
