"""What a plan says of things that are not here: the model, the data, the machines, and the hours."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import torch

from scaled.config import RunConfig
from scaled.launch import require_gpus
from scaled.log_rows import metrics_log
from scaled.memory.architecture import shipped

Rows = list[tuple[str, str]]
H100 = 989e12  # products in bf16 a second, dense, by its data sheet
UTILISATION = 0.4  # of it; an assumption
MADE_BY = {
    "dapo-math-7.5k.jsonl": "logra data dapo-math-7.5k {file}",
    "math-500.jsonl": "logra data math-500 {file}",
    "train.jsonl": "logra data reasoning-gym-hard {folder}",
    "eval.jsonl": "logra data reasoning-gym-hard {folder}",
}
STAND_IN = "27b-stand-in"


def absent_model(config: RunConfig, reason: str) -> str:
    """What is missing of a model that cannot be loaded, and how it is had."""
    path = config.model.path
    if path == STAND_IN:
        return f"model {path} has shapes alone, for plans; set model.path to the folder of a 27B model"
    if "/" in path and Path(path).name.lower() in shipped() and not Path(path).exists():
        return f"model {path} is not here; get it by: logra model {path} DIR, and set model.path=DIR"
    return reason


def absent_data(config: RunConfig) -> list[str]:
    """The files of problems that are not here, with the command that makes them."""
    files = [file for file in (config.data.file, config.data.held_out_file) if file and not file.exists()]
    return [_absent(file) for file in files]


def _absent(file: Path) -> str:
    command = MADE_BY.get(file.name)
    if command is None:
        return f"{file} is not here; give the path of a readable jsonl file"
    return f"{file} is not here; make it by: make data; {command.format(file=file, folder=file.parent)}"


def describe_machines(config: RunConfig) -> Rows:
    """Ranks and engines that `logra launch` starts. Raises ``UserError`` for too few GPUs."""
    launch, each, here = config.launch, config.engine.tensor_parallel, torch.cuda.device_count()
    require_gpus(config)
    gpus = launch.ranks + launch.engines * each
    engines = f"{_count(launch.engines, 'engine')} on {_count(each, 'GPU')}{' each' if launch.engines > 1 else ''}"
    found = f"here are {here}" if here else "here is none, so on the CPU"
    return [
        ("launch", f"{_count(launch.ranks, 'rank')} of the trainer and {engines}: {gpus} GPUs; {found}"),
        ("", "the peak of each GPU's memory, by phase: logra plan, with the same arguments"),
    ]


def describe_time(config: RunConfig, parameters: int | None) -> Rows:
    """Hours: by the run's own updates if there are some; else only what its training passes must take, counted."""
    log = metrics_log(config.run)
    done = [row for row in log.rows() if row.get("skipped", "") is None] if log.path.exists() else []
    if done:
        seconds, left = median(row["seconds"] for row in done[-20:]), max(0, config.updates - done[-1]["update"])
        return [("time", f"{seconds:.1f} s an update (median of the last), so {seconds * left / 3600:.1f} h to go")]
    rollout = config.rollout
    if parameters is None or rollout.context is None or config.model.compute_dtype != "bfloat16":
        return [("time", "unknown before the first updates")]
    # Forward 2 N, again with checkpointing, backward 2 N for inputs and, where weights have gradients, 2 N for those.
    passes = 4 + 2 * config.model.gradient_checkpointing + 2 * (config.method == "dense")
    tokens = rollout.prompts * rollout.responses_per_prompt * rollout.context
    seconds = passes * parameters * tokens / (config.launch.ranks * UTILISATION * H100)
    hours = seconds * config.updates / 3600
    return [
        ("time", "unknown before the first updates; what the paper measured stands at the head of its recipes"),
        (
            "",
            f"counted: {tokens:,} tokens an update at full length, {passes} FLOPs for each and parameter",
        ),
        (
            "",
            f"at {UTILISATION:.0%} of an H100's {H100 / 1e12:.0f} TFLOP/s, assumed, {config.launch.ranks} take "
            f"{seconds:.0f} s, {hours:.1f} h for all updates; attention, rollout, probe and sync come to that",
        ),
    ]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"
