"""The commands ``logra bench …``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from scaled.options import ENGINE_PYTHON, Config, EnginePython, Overrides

PEERS_FOLDER = Path(".venv-peers")


def writable(file: Path | None) -> Path | None:
    """The file, refused before anything is measured if it could not be written in the end."""
    if file and (file.is_dir() or not os.access(file.parent, os.W_OK)):
        raise typer.BadParameter(f"{file} cannot be written; name a file in a folder that exists")
    return file


JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", callback=writable, help="Also write all figures there.")
]
Repeats = Annotated[int, typer.Option(min=1, help="Timed rounds, in which each alternative has its turn.")]
Rank = Annotated[int, typer.Option(min=1, help="r, the columns of a sketch.")]
Tokens = Annotated[int, typer.Option(min=16, help="Of each of the two sequences of a batch.")]

bench = typer.Typer(help="Measure seconds, memory and bytes, with alternatives side by side.", no_args_is_help=True)


def report(found: dict[str, Any], show: Callable[[dict[str, Any], Console], None], file: Path | None) -> None:
    """Print the figures of a benchmark, and keep them in a file if one is named."""
    import json

    from scaled.files import save_text

    show(found, Console(highlight=False))
    if file:
        save_text(file, json.dumps(found, ensure_ascii=False, indent=1) + "\n")


@bench.command(epilog="Example: logra bench phases smollm2-demo --updates 2")
def phases(
    config: Config,
    overrides: Overrides = None,
    updates: Annotated[int, typer.Option(min=1, help="Updates measured for each method.")] = 3,
    ranks: Annotated[int, typer.Option(min=1, help="Processes that share the model.")] = 1,
) -> None:
    """Seconds and peak memory of an update by phase, LoGRA beside dense Adam and LoRA, on the same batches."""
    from scaled.bench.phases import compare, show
    from scaled.config_file import load_config

    show(compare(load_config(config, overrides or []), updates, ranks), Console(highlight=False))


@bench.command(epilog="Example: logra bench memory smollm2-demo rollout.max_new_tokens=64 microbatch=2")
def memory(
    config: Config,
    overrides: Overrides = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a made-up prompt.")] = 16,
) -> None:
    """The memory that `logra plan` foretells beside what torch's allocator gives out, on this machine's CPU.

    For LoGRA, dense Adam and LoRA, each in `launch.ranks` processes. Exit 1 if any differs by more than 10 %.
    """
    from scaled.bench.memory import compare, show
    from scaled.config_file import load_config

    found = compare(load_config(config, overrides or []), prompt=prompt_tokens)
    raise typer.Exit(0 if show(found, Console(highlight=False)) else 1)


@bench.command(epilog="Example: logra bench step --json step.json")
def step(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="smollm2, a folder in Hugging Face format, or for one decoder layer of it qwen2.5-math-1.5b, "
            "qwen2.5-math-7b or 27b-stand-in.",
        ),
    ] = "smollm2",
    tokens: Tokens = 256,
    repeats: Repeats = 5,
    methods: Annotated[str, typer.Option(help="METHOD or METHOD:RANK, by commas.")] = (
        "frozen,dense,logra:64,lora:64,logra:256,galore:128,apollo:256"
    ),
    checkpointing: Annotated[bool, typer.Option(help="Compute activations again in backward.")] = False,
    peers: Annotated[Path, typer.Option(help="The folder that has GaLore and APOLLO (`make peers`).")] = PEERS_FOLDER,
    json_file: JsonFile = None,
) -> None:
    """A training step (forward, backward, update) of LoGRA, dense Adam, LoRA, GaLore and APOLLO in turn.

    Seconds and memory over dense Adam's, beside the operations counted and the bound that follows from them. Each
    method has a process that stays, on the 135M model of 3 to 5 GB at 512 tokens.
    """
    from scaled.bench.step import compare, contenders_of
    from scaled.bench.step_show import show

    found = compare(
        contenders_of(methods), model, tokens=tokens, repeats=repeats, checkpointing=checkpointing, peers=peers
    )
    report(found, show, json_file)


@bench.command(epilog="Example: logra bench growth --plot growth.svg")
def growth(
    repeats: Repeats = 3,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", callback=writable, help="A picture, SVG or PNG by its name.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """How a step's seconds and memory grow with tokens, rank and width, on a decoder layer of the paper's models."""
    from scaled.bench.growth import compare, draw, show

    found = compare(repeats=repeats)
    report(found, show, json_file)
    if plot:
        draw(found, plot)


@bench.command(epilog="Example: logra bench probe smollm2-demo control.positions=256")
def probe(
    config: Config,
    overrides: Overrides = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a made-up prompt.")] = 64,
    repeats: Repeats = 5,
    json_file: JsonFile = None,
) -> None:
    """What predicting an update's KL costs beside one forward pass over the probe's tokens, by every way there is.

    And the share of an update that follows for the paper's recipes. Responses are made up, as long as they may be.
    """
    from scaled.bench.probe_cost import compare, show
    from scaled.config_file import load_config

    found = compare(load_config(config, overrides or []), prompt=prompt_tokens, repeats=repeats)
    report(found, show, json_file)


@bench.command(epilog="Example: logra bench refresh models/smollm2 --rank 256")
def refresh(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As for `bench step`.")] = "smollm2",
    rank: Rank = 256,
    tokens: Tokens = 512,
    repeats: Repeats = 5,
    json_file: JsonFile = None,
) -> None:
    """What drawing projections costs, and using them: counter-based bits beside torch's generator, and each kind."""
    from scaled.bench.refresh import compare, show

    report(compare(model, rank=rank, tokens=tokens, repeats=repeats), show, json_file)


@bench.command(epilog="Example: logra bench reduction smollm2 --ranks 2")
def reduction(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="smollm2, or a folder in Hugging Face format.")
    ] = "smollm2",
    rank: Rank = 64,
    ranks: Annotated[int, typer.Option(min=2, help="Processes that share the model.")] = 2,
    tokens: Tokens = 64,
    repeats: Repeats = 3,
    json_file: JsonFile = None,
) -> None:
    """Bytes that ranks sum in a backward pass: sketches beside dense gradients, counted and by formula."""
    from scaled.bench.reduction import compare, show

    report(compare(model, rank=rank, ranks=ranks, tokens=tokens, repeats=repeats), show, json_file)


@bench.command("sync", epilog="Example: logra bench sync models/smollm2")
def sync_bytes(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="A model's folder in Hugging Face format.")],
    rank: Rank = 64,
    updates: Annotated[int, typer.Option(min=1, help="Updates measured for each multiplier.")] = 3,
) -> None:
    """Bytes of an update by every exact way to send it: all weights, the numbers that changed, or factors."""
    from scaled.bench.sync_bytes import bench_sync

    bench_sync(model, Console(highlight=False), rank=rank, updates=updates)


@bench.command(epilog="Example: logra bench rounding models/smollm2 --updates 50")
def rounding(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="A model's folder in Hugging Face format, fp32.")],
    engine_python: EnginePython = ENGINE_PYTHON,
    rank: Rank = 64,
    updates: Annotated[int, typer.Option(min=1, help="Updates sent for each rounding.")] = 300,
    log: Annotated[Path, typer.Option(help="Where the engine's log goes.")] = Path("bench-rounding.log"),
) -> None:
    """What a real bf16 engine makes of the same updates: low halves kept, rounded to the nearest, or at random.

    Exit 1 if the first leaves any bit different, or the second leaves none.
    """
    from scaled.bench.rounding import DTYPE, bench_rounding
    from scaled.policy_sync.server import EngineSettings

    settings = EngineSettings(engine_python, model, log, DTYPE, max_model_len=64)
    well = bench_rounding(settings, Console(highlight=False), rank=rank, updates=updates)
    raise typer.Exit(0 if well else 1)


@bench.command(epilog="Example: logra bench graders --answers 200")
def graders(
    answers: Annotated[int, typer.Option(min=1, help="Hostile answers.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="They are made from it.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that one answer may take.")] = 2.0,
) -> None:
    """Hostile answers (code, power towers, deep nesting, megabytes, …) through the real graders.

    Exit 1 if one is over its time or has an effect.
    """
    from scaled.bench.graders import bench_graders

    well = bench_graders(Console(highlight=False), count=answers, seed=seed, timeout=timeout)
    raise typer.Exit(0 if well else 1)
