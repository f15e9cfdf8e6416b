"""``logra eval``: accuracy on the held-out problems, of a run's last checkpoint or of a model before training."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from scaled.answer_log import AnswerLog, about
from scaled.checkpoint import identity, latest_checkpoint, verify
from scaled.config import RunConfig
from scaled.config_file import load_config
from scaled.data import load_data
from scaled.errors import UserError
from scaled.evaluate import require_problems, summarise, ways
from scaled.interrupt import Interrupted, StopRequest
from scaled.launch import engine_settings, engines_running
from scaled.lock import locked_answers
from scaled.model import load_model, load_skeleton, resolve_model
from scaled.progress import RunProgress
from scaled.ranks import ALONE
from scaled.records import Problem
from scaled.rewards import Grader
from scaled.rollout import Rollout
from scaled.rollout.engines import FromEngines
from scaled.rollout.in_process import InProcess
from scaled.rollout.prompts import encode_prompts
from scaled.run import LOGS
from scaled.seeds import derive_seed

OF_THE_RUN = ("run", "model.path", "method", "updates", "seed", "data.held_out")  # the last two choose what is held out
ROUNDS = 4  # requests that engines are given at a time, over those that they work on
COMES_BACK = 20.0  # seconds: nothing starts an engine again here

Todo = dict[str, list[list[int]]]


def evaluate_run(target: Path, overrides: Sequence[str], out: Path | None = None) -> Path:
    """Show an evaluation, and return the file of its answers, ``out`` or one in or beside the run's folder.

    ``target`` is a run's folder, of which the last checkpoint is taken, or a configuration. Answers that are in the
    file are not asked for again. Raises ``UserError`` before anything is written for what can be known then.
    """
    config, update, weights = _chosen(target, overrides)
    if out is None and target.is_dir():
        out = config.run / "evaluations" / f"update-{update:06d}.jsonl"
    out = out or config.run.with_name(f"{config.run.name}-evaluation.jsonl")
    if config.threads:
        torch.set_num_threads(config.threads)
    _, held_out = load_data(config.data, config.seed)
    require_problems(held_out)
    with ExitStack() as stack:
        stop = StopRequest()
        grader = stack.enter_context(Grader(config))
        grader.prepare(held_out)
        model, tokenizer = (load_skeleton if config.rollout.backend == "vllm" else load_model)(config.model)
        rollout = config.rollout
        prompts = encode_prompts(model, tokenizer, held_out, rollout.max_new_tokens, rollout.context, config.longest)
        stack.enter_context(locked_answers(out))
        log = AnswerLog(out, about(config, held_out, weights))
        todo = _todo(log, config, held_out, [len(prompt) for prompt in prompts])
        stack.enter_context(stop.listening())
        source = stack.enter_context(_answering(config, model, tokenizer, out, stop)) if any(todo.values()) else None
        progress = stack.enter_context(RunProgress(config.updates, update))
        if source:
            source.follow(update)
            progress.phase("evaluate", sum(len(block) for blocks in todo.values() for block in blocks))
            try:
                _fill(log, todo, source, grader, config, held_out, progress, stop)
            except Interrupted:
                progress.note(f"stopped; the answers so far are in {out}, and the same command goes on from there")
                raise
        for name, samples, _, _ in ways(config.evaluation):
            kept = [log.get(name, problem, sample) for problem in held_out for sample in range(samples)]
            grader.require_any(kept, [one.score for one in kept])
            seed = derive_seed(config.seed, "bootstrap")
            row = summarise(kept, [one.score for one in kept], samples, seed=seed)
            progress.finish_evaluation({"update": update, "eval": name, **row})
            for source_name, score in (row["by_source"] or {}).items():
                progress.note(f"  {source_name}: {'nothing graded' if score is None else f'{score:.1%}'}")
            progress.note(f"  {row['response_tokens']:.0f} tokens a response, {row['truncated']:.1%} cut by the limit")
    return out


def _chosen(target: Path, overrides: Sequence[str]) -> tuple[RunConfig, int, str]:
    """The configuration with the model that is evaluated, its update, and what stands for its weights."""
    if target.is_dir() and (ignored := [o for o in overrides if o.partition("=")[0] in OF_THE_RUN]):
        raise UserError(f"`{ignored[0]}` cannot be set: of a run's folder its last checkpoint is evaluated, as it is")
    config = load_config(target, overrides)
    if not target.is_dir():
        return config, 0, _weights_of(config.model.path)
    checkpoint = latest_checkpoint(target)
    if checkpoint is None:
        raise UserError(f"run {target} has no checkpoint to evaluate; its {target / 'config.yaml'} can be evaluated")
    verify(checkpoint)
    model = config.model.model_copy(update={"path": str(checkpoint / "model")})
    update = int(checkpoint.name.rpartition("-")[2])
    return config.model_copy(update={"model": model}), update, identity(checkpoint)


def _weights_of(model: str) -> str:
    """The model's name, and of a folder's files what changes when they are written anew."""
    files = sorted(file for file in Path(model).glob("*") if file.is_file())
    written = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return f"{model} {hashlib.sha256(repr(written).encode()).hexdigest()[:12]}" if files else model


def _todo(log: AnswerLog, config: RunConfig, held_out: Sequence[Problem], lengths: Sequence[int]) -> Todo:
    """Blocks of what is to be answered, by the number of the answer, without those of which all is there.

    Blocks are the batches that an evaluation without interruption makes, in training too, so that their products are
    rounded alike: those of short prompts first.
    """
    size = config.rollout.batch
    if config.rollout.backend == "vllm":
        size = ROUNDS * config.engine.in_flight * (len(config.engine_urls) or config.launch.engines)
    todo: Todo = {}
    for name, samples, _, _ in ways(config.evaluation):
        order = sorted(range(samples * len(held_out)), key=lambda number, samples=samples: lengths[number // samples])
        blocks = [order[start : start + size] for start in range(0, len(order), size)]
        todo[name] = [
            block
            for block in blocks
            if any(log.get(name, held_out[number // samples], number % samples) is None for number in block)
        ]
    return todo


def _fill(
    log: AnswerLog,
    todo: Todo,
    source: Rollout,
    grader: Grader,
    config: RunConfig,
    held_out: Sequence[Problem],
    progress: RunProgress,
    stop: StopRequest,
) -> None:
    """Answer and grade what is to do, a block at a time, and write it down."""

    def advance(count: int) -> None:
        progress.advance(count)
        stop.check()

    for name, samples, temperature, top_p in ways(config.evaluation):
        for block in todo[name]:
            responses = source.respond(
                [held_out[number // samples] for number in block],
                block,
                temperature=temperature,
                top_p=top_p,
                seed=derive_seed(config.seed, "evaluate"),
                advance=advance,
            )
            scores = grader.grade(responses)
            for number, response, score in zip(block, responses, scores, strict=True):
                log.add(name, number % samples, response, score)
            stop.check()


@contextmanager
def _answering(
    config: RunConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    stop: StopRequest,
) -> Iterator[Rollout]:
    """Who answers: this process, the engines that are named, or those that are started here."""
    if config.rollout.backend == "hf":
        yield InProcess(model, tokenizer, config)
        return
    folder = Path(resolve_model(config.model.path))
    if not any(folder.glob("*.safetensors")):
        raise UserError(
            f"engines take the weights of {config.model.path} from a folder of safetensors, which it is not here; save "
            f"it by: logra model {config.model.path} DIR, and set model.path=DIR"
        )
    # A folder of its own: the run may be going on meanwhile.
    work = out.with_name(f"{out.stem}-engines")
    config = config.model_copy(update={"run": work})
    with ExitStack() as stack:
        token = None
        if not config.engine_urls:
            engines = engine_settings(config, training=False)
            (work / LOGS).mkdir(parents=True, exist_ok=True)
            token = engines[0].token
            processes = stack.enter_context(engines_running(engines, Console(highlight=False)))
            engine = config.engine.model_copy(
                update={"launched": tuple(process.url for process in processes), "transport": "folder"}
            )
            launch = config.launch.model_copy(update={"patience": COMES_BACK})
            config = config.model_copy(update={"engine": engine, "launch": launch})
        rollout = FromEngines(model, tokenizer, config, None, ALONE, folder, stop, token)
        stack.callback(rollout.close)
        yield rollout
    with suppress(OSError):  # logs are in it
        work.rmdir()
