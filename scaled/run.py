"""A run: what stays from its first batch to its last, how it is opened, and how it is saved."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from logra_ref.rl import RunningBaseline
from scaled.build import build_method, build_policy, build_rollout
from scaled.checkpoint import latest_checkpoint, load_numbers, load_tensors, save_checkpoint, update_of
from scaled.config import RunConfig
from scaled.config_file import dump_config, load_config, settings_of
from scaled.data import ProblemStream, load_data
from scaled.errors import UserError
from scaled.files import save_text
from scaled.interrupt import Interrupted, StopRequest
from scaled.lock import LOCK, locked, require_idle
from scaled.log_rows import metrics_log, samples_log
from scaled.methods import Method
from scaled.metrics import JsonLines
from scaled.model import resolve_device
from scaled.policy import Policy
from scaled.progress import RunProgress
from scaled.ranks import Ranks, joined_ranks
from scaled.records import Problem
from scaled.rewards import Grader
from scaled.rollout import Rollout
from scaled.rollout.prompts import encode_prompts
from scaled.section import CountOrZero, Finite, Numbers
from scaled.trackers import opened_trackers, require_packages

LOGS = "logs"  # of the engines that `logra launch` starts before there is a run
# On resume; everything else would make another run of it.
MAY_CHANGE = ("updates", "trackers", "evaluation", "checkpoint", "engine", "launch")


class RunNumbers(Numbers):
    """The numbers of a checkpoint."""

    update: CountOrZero
    batch: CountOrZero
    baseline: Finite
    method: dict[str, Any]


@dataclass
class Run:
    """What stays for the whole run. ``update`` and ``batch`` count what was applied and what was taken."""

    config: RunConfig
    ranks: Ranks
    policy: Policy
    tokenizer: PreTrainedTokenizerBase
    method: Method
    rollout: Rollout
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
    track: Callable[[dict[str, Any]], None] = lambda row: None

    @property
    def model(self) -> PreTrainedModel:
        return self.policy.model

    def numbers(self) -> dict[str, Any]:
        """What a checkpoint has beside tensors."""
        return {
            "update": self.update,
            "batch": self.batch,
            "baseline": self.baseline.value,
            "method": self.method.numbers(),
        }

    def load(self, checkpoint: Path, numbers: dict[str, Any]) -> None:
        """Go on where a checkpoint stopped. Raises ``ValueError`` for a state that is none of this run's."""
        held = RunNumbers.read(numbers)
        if held.batch < held.update or held.update != update_of(checkpoint):
            raise ValueError(f"update {held.update} of batch {held.batch}")
        tensors = self.method.tensors()
        try:
            load_tensors(checkpoint, tensors, self.ranks)
        except (KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        self.method.load(tensors, held.method)
        self.update, self.batch, self.baseline.value = held.update, held.batch, held.baseline

    def advance(self, count: int) -> None:
        """Some parts of a phase are done. One process alone may stop here; ranks stop together, at ``may_stop``."""
        self.progress.advance(count)
        if self.ranks.world == 1:
            self.stop.check()

    def log(self, rows: Iterable[dict[str, Any]], samples: Iterable[dict[str, Any]]) -> None:
        """Add rows to the two logs; for the first rank alone."""
        for row in rows:
            self.metrics.append(row)
            self.track(row)
        for sample in samples:
            self.samples.append(sample)

    def may_stop(self) -> None:
        """Stop if any rank was asked to. Every rank has to come here."""
        if self.ranks.any(self.stop.requested):
            raise Interrupted


@contextmanager
def open_run(config: RunConfig, *, resume: bool) -> Iterator[Run]:
    """Check everything that can be checked, then load data, reward, model and, to resume, the last checkpoint.

    The folder is locked until the run is left. Raises ``UserError`` before anything else in it is touched. With
    several ranks the first of them reads and writes the folder.
    """
    with ExitStack() as stack:
        stop = StopRequest()
        ranks = stack.enter_context(joined_ranks(resolve_device(config.model.device), stop.ask))
        require_same_settings(config, ranks)
        checkpoint, numbers = ranks.on_first(lambda: _checked_folder(config, resume, stack))
        if config.threads:
            torch.set_num_threads(config.threads)
        with ranks.together():
            problems, held_out = load_data(config.data, config.seed)
            grader = stack.enter_context(Grader(config))
            grader.prepare([*problems, *held_out])
        source = config.model
        if checkpoint and config.method != "lora":  # adapters are of the state; they want the weights under them
            source = source.model_copy(update={"path": str(checkpoint / "model")})
        policy, tokenizer = build_policy(config, source, ranks)
        with ranks.together():
            encode_prompts(
                policy.model,
                tokenizer,
                [*problems, *held_out],
                config.rollout.max_new_tokens,
                config.rollout.context,
                config.longest,
            )
        method = build_method(policy, config, ranks)
        rollout = build_rollout(config, source, policy, tokenizer, method, ranks, stop)
        stack.callback(rollout.close)
        run = Run(
            config=config,
            ranks=ranks,
            policy=policy,
            tokenizer=tokenizer,
            method=method,
            rollout=rollout,
            stream=ProblemStream(problems, config.seed),
            held_out=held_out,
            grader=grader,
            metrics=metrics_log(config.run),
            samples=samples_log(config.run),
            # Ranks stop together.
            progress=RunProgress(
                config.updates, 0, shown=ranks.first, ask_to_stop=stop.ask if ranks.world > 1 else None
            ),
            stop=stop,
            baseline=RunningBaseline(weight=config.loss.baseline_weight),
        )
        if checkpoint:
            try:
                run.load(checkpoint, numbers)
            except ValueError as error:
                raise UserError(
                    f"the state in {checkpoint} is not that of this run ({error}); move {checkpoint} out of the way, "
                    "and the run resumes from the one before, or start the run anew"
                ) from error
        ranks.on_first(lambda: _begin(run, resume, stack))
        with run.stop.listening(), run.progress:
            yield run


def _checked_folder(config: RunConfig, resume: bool, stack: ExitStack) -> tuple[Path | None, dict[str, Any]]:
    """The checkpoint to resume from and its numbers, once all that is in the folder could be read."""
    require_packages(config.trackers)
    if not resume:
        require_new_folder(config.run)
        return None, {}
    find_checkpoint(config)
    stack.enter_context(locked(config.run))
    checkpoint = latest_checkpoint(config.run)  # of which another process may just have made a newer one
    numbers = load_numbers(checkpoint)  # before the model: it checks the files of both
    for log in (metrics_log(config.run), samples_log(config.run)):
        log.rows()  # a row that cannot be read shows now, before one of the two is rewound
    return checkpoint, numbers


def _begin(run: Run, resume: bool, stack: ExitStack) -> None:
    """Touch the folder for the first time."""
    folder = run.config.run
    if resume:
        run.metrics.rewind(run.batch)
        run.samples.rewind(run.batch)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(locked(folder))
        require_empty(folder)  # still: another process may have had it since
    run.track = stack.enter_context(opened_trackers(run.config, update=run.update, resume=resume))
    save_text(folder / "config.yaml", dump_config(run.config))


def require_new_folder(run: Path) -> None:
    """Raises ``UserError`` unless ``run`` is an empty folder or can become one."""
    above = next(path for path in (run, *run.absolute().parents) if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise UserError(f"run folder {run} cannot be made: {above} is no folder to write in; set run=FOLDER")
    if run.is_symlink() and not run.exists():
        raise UserError(f"run folder {run} is a link to {run.readlink()}, which does not exist; set run=FOLDER")
    require_idle(run)
    require_empty(run)


def require_empty(run: Path) -> None:
    """Raises ``UserError`` if there is a folder with anything in it but the lock and logs of engines."""
    if run.exists() and any(path.name not in (LOCK, LOGS) for path in run.iterdir()):
        if latest_checkpoint(run):
            way = "go on with --resume, or set run=FOLDER"
        elif (run / "config.yaml").exists():
            way = "it has no checkpoint to resume from, so remove it, or set run=FOLDER"
        else:
            way = "it is not empty, and no run's; set run=FOLDER"
        raise UserError(f"run folder {run} exists already: {way}")


def require_same_settings(config: RunConfig, ranks: Ranks) -> None:
    """Raises ``UserError`` if ranks were started with different configurations."""
    settings = ranks.gather(dict(settings_of(config.model_dump())))
    for rank, other in enumerate(settings):
        for key, value in settings[0].items():
            if other[key] != value:
                raise UserError(f"rank 0 has {key} = {value!r} and rank {rank} {other[key]!r}; start all ranks alike")


def resume_command(config: RunConfig) -> str:
    """What goes on with a run that was stopped."""
    return f"logra {'launch' if config.rollout.backend == 'vllm' else 'train'} {config.run} --resume"


def find_checkpoint(config: RunConfig) -> Path:
    """The checkpoint to resume from. Raises ``UserError`` if there is none, or if the run was made otherwise."""
    require_idle(config.run)
    checkpoint = latest_checkpoint(config.run)
    if checkpoint is None:
        raise UserError(
            f"run folder {config.run} has no checkpoint to resume from; remove what is there and start without --resume"
        )
    before = load_config(config.run / "config.yaml", [])
    old, new = dict(settings_of(before.model_dump())), dict(settings_of(config.model_dump()))
    changed = [
        f"{key} = {old[key]!r}, and now it is {new[key]!r}"
        for key in new
        if key.partition(".")[0] not in (*MAY_CHANGE, "run") and old[key] != new[key]
    ]
    if changed:
        raise UserError(
            f"{config.run} was made with {'; '.join(changed)}. Resume as it was made, `{resume_command(config)}` "
            f"(only {', '.join(MAY_CHANGE)} may change), or start another run"
        )
    return checkpoint


def save(run: Run) -> None:
    """Save a checkpoint of the last applied update."""
    run.progress.note(f"saving update {run.update}")
    checkpoint = save_checkpoint(
        run.config.run,
        run.update,
        model=run.model,
        tokenizer=run.tokenizer,
        weights=run.method.weights(),
        tensors=run.method.tensors(),
        numbers=run.numbers(),
        keep_last=run.config.checkpoint.keep_last,
        ranks=run.ranks,
    )
    run.rollout.saved(run.update, checkpoint / "model")
