"""``logra train --dry-run``: what a configuration would do, and what stands in its way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoModelForCausalLM, PreTrainedModel

from logra_ref.sketch import last_part
from scaled.build import build_method, prepare_model
from scaled.checkpoint import verify
from scaled.config import RunConfig
from scaled.data import load_data
from scaled.errors import UserError
from scaled.memory.architecture import architecture
from scaled.model import load_skeleton, resolve_device
from scaled.outlook import absent_data, absent_model, describe_machines, describe_time
from scaled.policy import Policy
from scaled.ranks import ALONE
from scaled.records import Problem
from scaled.rewards import Grader
from scaled.rollout.prompts import encode_prompts
from scaled.run import find_checkpoint, require_new_folder
from scaled.smollm2 import SMOLLM2, smollm2_folder
from scaled.trackers import require_packages

Rows = list[tuple[str, str]]


def plan(config: RunConfig, console: Console, *, resume: bool, launch: bool = False) -> list[str]:
    """Show what would be done, and return what is missing. Nothing is loaded but shapes, fetched, or written.

    ``launch``: with the engines and ranks that `logra launch` starts.
    """
    missing: list[str] = []
    rows: Rows = [
        (
            "run",
            f"{config.run}: {config.updates} update{'s'[: config.updates - 1]} by {config.method}, seed {config.seed}",
        )
    ]
    with _noting(missing):
        require_packages(config.trackers)
    with _noting(missing):
        if resume:
            checkpoint = find_checkpoint(config)
            verify(checkpoint)
            rows.append(("", f"goes on from {checkpoint}"))
        else:
            require_new_folder(config.run)
    rows.append(("model", config.model.path))
    model, tokenizer, problems, held_out = None, None, [], []
    with _noting(missing):
        rows.append(("", f"on {resolve_device(config.model.device)}, products in {config.model.compute_dtype}"))
    with _noting(missing):
        if config.model.path == SMOLLM2 and not smollm2_folder().is_dir():
            rows.append(("", "not here yet: fetched when training starts (93 MB); its shapes are known then"))
        else:
            try:
                model, tokenizer = load_skeleton(config.model, fetch=False)
            except UserError as error:
                missing.append(absent_model(config, str(error)))
                model = shipped_skeleton(config)
            if model is not None:
                rows += describe_training(model, config)
    if launch:
        with _noting(missing):
            if not config.launch.python.is_file():
                missing.append(
                    f"{config.launch.python} is not there, the Python of an environment with vLLM: make engine"
                )
            rows += describe_machines(config)
    rows += describe_batches(config)
    missing += (absent := absent_data(config))
    with _noting(missing if not absent else []):
        problems, held_out = load_data(config.data, config.seed)
        rows += describe_data(config, problems, held_out)
        if tokenizer is not None:
            rollout = config.rollout
            encode_prompts(
                model, tokenizer, [*problems, *held_out], rollout.max_new_tokens, rollout.context, config.longest
            )
    with _noting(missing):
        rows += describe_time(config, None if model is None else sum(p.numel() for p in model.parameters()))
    with _noting(missing), Grader(config) as grader:
        grader.prepare([*problems, *held_out])
        rows.append(("reward", config.reward))

    rows += [("missing", text) for text in missing or ["nothing"]]
    table = Table.grid("", "", padding=(0, 2))
    for name, text in rows:
        table.add_row(name, Text(text, style="red" if missing and name == "missing" else ""))
    console.print(table)
    return missing


def describe_training(model: PreTrainedModel, config: RunConfig) -> Rows:
    """What is trained, and what each method keeps for it between updates. The model may have no weights."""
    total = sum(parameter.numel() for parameter in model.parameters())
    matrices = [layer.weight for name, layer in model.named_modules() if last_part(name) in config.logra.targets]
    selected = sum(weight.numel() for weight in matrices)
    prepare_model(model, config)  # refuses what cannot be trained
    method = build_method(Policy(model), config, ALONE)
    trained, state = sum(parameter.numel() for parameter in method.parameters.values()), method.state_bytes()
    name = {
        "logra": f"LoGRA, rank {config.logra.rank}",
        "lora": f"LoRA, rank {config.lora.rank}",
        "dense": "dense Adam",
    }
    rows = [
        ("", f"{type(model).__name__}, {total:,} parameters, {_size(4 * total)} of weights in fp32"),
        ("trained", f"{trained:,} parameters ({trained / total:.1%}); {len(matrices)} matrices are selected"),
        ("memory", _parts(name[config.method], state)),
    ]
    if config.rollout.backend == "vllm":
        rows.append(("engines", _parts("each, over its workers", engine_bytes(total, config))))
    if config.method != "dense":
        dense = {"gradients": 4 * selected, "Adam's moments": 8 * selected}
        rows.append(("", _parts("for comparison, dense Adam of these matrices", dense)))
    return rows


def engine_bytes(parameters: int, config: RunConfig) -> dict[str, int]:
    """What an engine holds of the model, and of the trainer's weights beside it if it is to follow them in bf16."""
    if config.engine.dtype == "float32":
        return {"weights": 4 * parameters}
    where = "low halves" if config.engine.low_halves == "device" else "low halves on the host"
    low = {where: 2 * parameters} if config.engine.rounding == "exact" else {}
    return {"weights": 2 * parameters} | low


def shipped_skeleton(config: RunConfig) -> PreTrainedModel | None:
    """The model by its shipped architecture, if there is one, without weights and tokenizer."""
    try:
        settings = architecture(config.model.path)
    except UserError:
        return None
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(settings, dtype=torch.float32)


def describe_data(config: RunConfig, problems: list[Problem], held_out: list[Problem]) -> Rows:
    """The data, and how far the run goes through it."""
    responses = config.rollout.prompts * config.rollout.responses_per_prompt
    epochs = config.updates * config.rollout.prompts / len(problems)
    return [
        ("data", f"{config.data.task or config.data.file}: {len(problems)} problems, {len(held_out)} held out"),
        ("", f"{config.updates} updates take {config.updates * responses} responses, {epochs:.1f} epochs"),
    ]


def describe_batches(config: RunConfig) -> Rows:
    """What a batch is, and who samples it."""
    rollout = config.rollout
    responses = rollout.prompts * rollout.responses_per_prompt
    urls = ", ".join(config.engine_urls) or f"{config.launch.engines} that `logra launch` starts"
    engines = f"vLLM engines in {config.engine.dtype}, {urls}; they get updates as {config.policy_sync}"
    return [
        (
            "batch",
            f"{rollout.prompts} problems × {rollout.responses_per_prompt} = {responses} responses of "
            f"{rollout.limit}, {min(config.microbatch, responses)} in a microbatch",
        ),
        ("", f"sampled by {'transformers, in this process' if rollout.backend == 'hf' else engines}"),
    ]


def _parts(what: str, counts: dict[str, int]) -> str:
    """Sizes by name, and their sum."""
    return f"{what}: {', '.join(f'{n} {_size(c)}' for n, c in counts.items())}: {_size(sum(counts.values()))} in all"


@contextmanager
def _noting(missing: list[str]) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        missing.append(str(error))


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
