"""A run: what stays from its first batch to its last, how it is opened, and how it is saved."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from logra_ref.rl import RunningBaseline
from scaled.checkpoint import latest_checkpoint, load_state, save_checkpoint, save_text
from scaled.config import RunConfig
from scaled.config_file import dump_config, load_config
from scaled.data import ProblemStream, load_data
from scaled.errors import UserError
from scaled.interrupt import StopRequest
from scaled.log_rows import metrics_log, samples_log
from scaled.methods import Method, build_method
from scaled.metrics import JsonLines
from scaled.model import load_model
from scaled.progress import RunProgress
from scaled.records import Problem
from scaled.rewards import Grader
from scaled.rollout import encode_prompts

MAY_CHANGE = ("updates", "evaluation", "checkpoint")  # on resume; everything else would make another run of it


@dataclass
class Run:
    """What stays for the whole run. ``update`` and ``batch`` count what was applied and what was taken."""

    config: RunConfig
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    method: Method
    stream: ProblemStream
    held_out: list[Problem]
    grader: Grader
    metrics: JsonLines
    samples: JsonLines
    progress: RunProgress
    stop: StopRequest
    baseline: RunningBaseline
    update: int = 0
    batch: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "update": self.update,
            "batch": self.batch,
            "baseline": self.baseline.value,
            "method": self.method.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ``ValueError`` for a state that is none of this run's."""
        try:
            self.update, self.batch, self.baseline.value = state["update"], state["batch"], float(state["baseline"])
            self.method.load_state_dict(state["method"])
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        if not (type(self.update) is int and type(self.batch) is int and self.batch >= self.update >= 0):
            raise ValueError(f"update {self.update!r} of batch {self.batch!r}")

    def advance(self, count: int) -> None:
        self.progress.advance(count)
        self.stop.check()


@contextmanager
def open_run(config: RunConfig, *, resume: bool) -> Iterator[Run]:
    """Check everything that can be checked, then load data, reward, model and, to resume, the last checkpoint.

    Raises ``UserError`` before the run's folder is touched.
    """
    checkpoint = find_checkpoint(config) if resume else None
    state = load_state(checkpoint) if checkpoint else None  # before the model: it checks the files of both
    metrics, samples = metrics_log(config.run), samples_log(config.run)
    if resume:  # a row that cannot be read shows now, before one of the two is rewound
        for log in (metrics, samples):
            log.rows()
    else:
        require_new_folder(config.run)
    if config.threads:
        torch.set_num_threads(config.threads)
    problems, held_out = load_data(config.data, config.seed)
    with Grader(config) as grader:
        source = config.model
        if checkpoint:
            source = source.model_copy(update={"path": str(checkpoint / "model")})
        model, tokenizer = load_model(source)
        encode_prompts(model, tokenizer, [*problems, *held_out], config.rollout.max_new_tokens)
        method = build_method(model, config)
        if config.model.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        config.run.mkdir(parents=True, exist_ok=True)
        run = Run(
            config=config,
            model=model,
            tokenizer=tokenizer,
            method=method,
            stream=ProblemStream(problems, config.seed),
            held_out=held_out,
            grader=grader,
            metrics=metrics,
            samples=samples,
            progress=RunProgress(config.updates, 0),
            stop=StopRequest(),
            baseline=RunningBaseline(weight=config.loss.baseline_weight),
        )
        if state:
            try:
                run.load_state_dict(state)
            except ValueError as error:
                raise UserError(
                    f"the state in {checkpoint} is not that of this run ({error}); move {checkpoint} out of the way, "
                    "and the run resumes from the one before, or start the run anew"
                ) from error
            metrics.rewind(run.batch)
            samples.rewind(run.batch)
        save_text(config.run / "config.yaml", dump_config(config))
        with run.stop.listening(), run.progress:
            yield run


def require_new_folder(run: Path) -> None:
    """Raises ``UserError`` unless ``run`` is an empty folder or can become one."""
    above = next(path for path in (run, *run.absolute().parents) if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise UserError(f"run folder {run} cannot be made: {above} is no folder to write in; set run=FOLDER")
    if run.is_symlink() and not run.exists():
        raise UserError(f"run folder {run} is a link to {run.readlink()}, which does not exist; set run=FOLDER")
    if run.exists() and any(run.iterdir()):
        way = "go on with --resume" if latest_checkpoint(run) else "it has no checkpoint to resume from, so remove it"
        raise UserError(f"run folder {run} exists already: {way}, or set run=FOLDER")


def find_checkpoint(config: RunConfig) -> Path:
    """The checkpoint to resume from. Raises ``UserError`` if there is none, or if the run was made otherwise."""
    checkpoint = latest_checkpoint(config.run)
    if checkpoint is None:
        raise UserError(
            f"run folder {config.run} has no checkpoint to resume from; remove what is there and start without --resume"
        )
    before = load_config(config.run / "config.yaml", [])
    old, new = dict(_settings(before.model_dump())), dict(_settings(config.model_dump()))
    changed = [
        f"{key} = {old[key]!r}, and now it is {new[key]!r}"
        for key in new
        if key.partition(".")[0] not in (*MAY_CHANGE, "run") and old[key] != new[key]
    ]
    if changed:
        raise UserError(
            f"{config.run} was made with {'; '.join(changed)}. Resume as it was made, `logra train {config.run} "
            f"--resume` (only {', '.join(MAY_CHANGE)} may change), or start another run"
        )
    return checkpoint


def _settings(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each setting by its dotted key."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def save(run: Run) -> None:
    """Save a checkpoint of the last applied update."""
    run.progress.note(f"saving update {run.update}")
    save_checkpoint(
        run.config.run,
        run.update,
        model=run.model,
        tokenizer=run.tokenizer,
        state=run.state_dict(),
        keep_last=run.config.checkpoint.keep_last,
    )
