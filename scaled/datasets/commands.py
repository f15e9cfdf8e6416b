"""The commands ``logra data …``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

data = typer.Typer(help="Make the paper's data sets, as jsonl that `train` and `eval` read.", no_args_is_help=True)

Out = Annotated[Path, typer.Argument(metavar="OUT", help="The jsonl file to write.")]
SOURCE = "A parquet or jsonl file, a folder of them, or a name on the hub."


@data.command("dapo-math-7.5k", epilog="Example: logra data dapo-math-7.5k dapo-math-7.5k.jsonl dapo-math-17k.parquet")
def dapo_math(
    out: Out, source: Annotated[str, typer.Argument(help=SOURCE)] = "BytedTsinghua-SIA/DAPO-Math-17k"
) -> None:
    """Write the first 7,500 unique prompts of DAPO-Math-17k, in its order. Needs `make data`."""
    from scaled.datasets.mathematics import dapo_math as make

    make(out, source, Console(highlight=False))


@data.command("math-500", epilog="Example: logra data math-500 math-500.jsonl test.jsonl")
def math_500(out: Out, source: Annotated[str, typer.Argument(help=SOURCE)] = "HuggingFaceH4/MATH-500") -> None:
    """Write the 500 problems of MATH-500, each as a user's message. Needs `make data`."""
    from scaled.datasets.mathematics import math_500 as make

    make(out, source, Console(highlight=False))


@data.command("reasoning-gym-hard", epilog="Example: logra data reasoning-gym-hard data/reasoning-gym-hard")
def reasoning_gym_hard(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder for train.jsonl and eval.jsonl.")],
    seed: Annotated[int, typer.Option(min=0, help="Of the first training candidate of each task.")] = 42,
    candidates: Annotated[int, typer.Option(min=1, max=1_000_000, help="Training candidates of each task.")] = 5000,
) -> None:
    """Draw the eight tasks of Reasoning-Gym Hard, and show their counts beside the paper's. Needs `make data`.

    The task codeio runs programs that come with reasoning-gym: in a process of its own, in an empty folder.

    A call that was interrupted is gone on with by the same call.
    """
    from scaled.datasets.hard_mixture import make, show

    console = Console(highlight=False)
    show(make(folder, console, seed=seed, candidates=candidates), console, candidates)
