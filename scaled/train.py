"""The training loop: prompts → rollout → reward → advantage → sketch → direction → α → weight."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

from logra_ref.rl import RunningBaseline, group_relative_advantages, without_signal
from scaled.answer import answer
from scaled.config import RunConfig
from scaled.errors import NumericalTrouble, UserError
from scaled.evaluate import evaluate
from scaled.gradients import accumulate_gradients, build_probe
from scaled.interrupt import Interrupted
from scaled.metrics import JsonLines, peak_bytes
from scaled.records import Response, Score
from scaled.report import write_report
from scaled.run import Run, open_run, resume_command, save
from scaled.samples import sample_rows
from scaled.seeds import derive_seed

Value = TypeVar("Value")
MOST_SKIPPED = 20  # batches in a row
# Not to be resumed with: a run keeps its settings.
SMALLER_STEPS = (
    "start another run with smaller steps (control.budget_max, control.alpha_max, dense.lr), from a good checkpoint of "
    "this one if you like (model.path=CHECKPOINT/model)"
)
SAMPLES_OF_BATCH, SAMPLES_OF_EVALUATION = 4, 16  # responses kept in samples.jsonl


def train(config: RunConfig, *, resume: bool = False) -> Path:
    """Train until ``config.updates`` updates were applied, and return the path of the report.

    Raises ``UserError`` for what the caller has to mend and ``NumericalTrouble`` for a batch that would have spoilt
    the weights; either leaves weights and checkpoints as they were.
    """
    with open_run(config, resume=resume) as run:
        skipped = 0
        try:
            while True:
                if evaluation_due(run):
                    done_or_saved(run, evaluate_held_out)
                if run.update >= config.updates:
                    break
                row = done_or_saved(run, take_batch)
                skipped = skipped + 1 if row["skipped"] else 0
                if skipped == MOST_SKIPPED:
                    save(run)
                    raise UserError(
                        f"{skipped} batches in a row gave nothing to learn from, the last because: {row['skipped']} "
                        f"{remedy(run)}"
                    )
                every = config.checkpoint.every
                if not row["skipped"] and (run.update == config.updates or (every and run.update % every == 0)):
                    save(run)
        except Interrupted:
            save(run)
            run.progress.note(f"stopped after update {run.update}; go on with: {resume_command(config)}")
            raise
        return run.ranks.on_first(lambda: write_report(config.run))


def remedy(run: Run) -> str:
    """What may help a run whose last batch gave no update."""
    if (refused := refused_path(run, run.batch)).exists():
        return f"Look in {refused} for extreme rewards or tokens; if there are none, {SMALLER_STEPS}."
    return (
        f"See {run.samples.path} for what the model answers; an easier task, a started answer or more responses to "
        "each prompt give it something to succeed at."
    )


def done_or_saved(run: Run, work: Callable[[Run], Value]) -> Value:
    """``work``; what the user has to mend, a reward function for one, costs no update that was made before."""
    taken = run.batch
    try:
        return work(run)
    except UserError as error:
        if run.batch > taken:  # its row could not be written: from the last checkpoint it is taken again
            raise
        save(run)
        raise UserError(f"{error}. Update {run.update} is saved; go on with: {resume_command(run.config)}") from error


def take_batch(run: Run) -> dict[str, Any]:
    """One update from prompts to weights, and its row of the log. A batch without signal changes the baseline only."""
    config, progress = run.config, run.progress
    batch_number, update = run.batch + 1, run.update + 1

    # prompts → rollout → reward
    began = perf_counter()
    run.rollout.follow(run.update)
    started = perf_counter()
    problems = run.stream.take(run.batch * config.rollout.prompts, config.rollout.prompts)
    asked = [problem for problem in problems for _ in range(config.rollout.responses_per_prompt)]
    progress.phase("rollout", len(asked))
    responses, scores = answer(
        run.rollout,
        asked,
        run.grader,
        update=run.update,
        temperature=config.rollout.temperature,
        seed=derive_seed(config.seed, "rollout", batch_number),
        advance=run.advance,
        ranks=run.ranks,
    )
    run.may_stop()

    # → advantage
    graded = [i for i, score in enumerate(scores) if score.reward is not None]
    rewards = torch.tensor([scores[i].reward for i in graded], dtype=torch.float64)
    baseline = RunningBaseline(run.baseline.value, config.loss.baseline_weight)
    if config.loss.advantage == "running_baseline":
        advantages = baseline.advantages(rewards)
    else:
        advantages = group_relative_advantages(
            rewards, torch.tensor([i // config.rollout.responses_per_prompt for i in graded])
        )
    seconds_rollout = perf_counter() - started
    row = batch_row(run, update, batch_number, responses, scores, advantages, seconds_rollout)

    step = None
    if config.skip_without_signal and without_signal(advantages):
        row["skipped"] = f"every advantage of the batch is {float(advantages[0]):.4g}: no signal."
    else:
        try:
            # → sketch → direction → α → weight
            trained = [responses[i] for i in graded]
            row |= accumulate_gradients(run, trained, advantages.to(run.model.device, torch.float32))
            run.may_stop()
            require_agreement(run, row["log_prob_difference"])
            probe = build_probe(run, trained, batch_number)
            step = run.method.step(update, probe, row["mismatch_kl"], run.may_stop)
        except (FloatingPointError, NumericalTrouble) as error:
            run.method.zero_grad()
            refuse(run, batch_number, responses, scores, str(error))
            row["skipped"] = f"{error}."
            baseline = run.baseline
    if step is not None:
        if not math.isfinite(step.realised_kl):
            raise NumericalTrouble(
                f"update {update} has ruined the policy: its realised KL is {step.realised_kl}. It is not saved; "
                f"{SMALLER_STEPS}"
            )
        run.update = update
        row |= asdict(step)
    run.batch, run.baseline = batch_number, baseline
    most = max(run.ranks.gather(peak_bytes(run.model.device)))
    row |= {"baseline": baseline.value, "seconds": perf_counter() - began, "peak_bytes": most}
    few = responses[:SAMPLES_OF_BATCH], scores[:SAMPLES_OF_BATCH]
    run.ranks.on_first(lambda: run.log([row], sample_rows(*few, batch_number, update, "train")))
    progress.finish_update(row)
    return row


def batch_row(
    run: Run,
    update: int,
    batch_number: int,
    responses: list[Response],
    scores: list[Score],
    advantages: Tensor,
    seconds_rollout: float,
) -> dict[str, Any]:
    """The part of a row that is known once a batch is graded."""
    rewards = [score.reward for score in scores if score.reward is not None]
    formed = [score.well_formed for score in scores if score.well_formed is not None]
    count, cost, in_process = len(responses), run.rollout.cost(), run.config.rollout.backend == "hf"
    return {
        "update": update,
        "batch": batch_number,
        "method": run.config.method,
        "skipped": None,
        "reward": sum(rewards) / len(rewards),
        "right": sum(score.outcome == "right" for score in scores) / count,
        "well_formed": sum(formed) / len(formed) if formed else None,
        "unparseable": sum(score.outcome == "unparseable" for score in scores) / count,
        "grader_failed": count - len(rewards),
        "advantage_std": float(advantages.std(correction=0)),
        "response_tokens": sum(len(response.token_ids) for response in responses) / count,
        "truncated": sum(response.truncated for response in responses) / count,
        "other_version": None if in_process else sum(response.other_version for response in responses) / count,
        "seconds_rollout": seconds_rollout,
        "seconds_sync": cost and cost.seconds,
        "sync_bytes": cost and cost.sync_bytes,
    }


def require_agreement(run: Run, difference: float | None) -> None:
    """Raises ``UserError`` if engines and trainer are further apart than rounding can make them."""
    limit = run.config.engine.log_prob_limit
    if difference is None or difference <= limit:
        return
    if (rounding := run.config.engine.rounding) == "exact":
        run.rollout.verify()  # says so where their weights differ
        why = ", though their weights are equal; do both compute with the same model?"
    else:
        why = f"; their weights drift apart by engine.rounding={rounding}"
    raise UserError(
        f"log-probabilities of engines and trainer differ by {difference:.3g} a token in the mean, and "
        f"engine.log_prob_limit is {limit}{why}"
    )


def refuse(run: Run, batch_number: int, responses: list[Response], scores: list[Score], reason: str) -> None:
    """Keep a batch that would have spoilt the weights, and stop unless the configuration says to go on."""
    path = refused_path(run, batch_number)

    def keep() -> None:
        path.unlink(missing_ok=True)
        kept = JsonLines(path)
        for sample in sample_rows(responses, scores, batch_number, run.update + 1, "train"):
            kept.append(sample)

    run.ranks.on_first(keep)
    if run.config.on_non_finite == "stop":
        save(run)
        raise NumericalTrouble(
            f"update {run.update + 1} was refused: {reason}. The weights are those of update {run.update}, and the "
            f"batch is in {path}. Look there for extreme rewards or tokens; `on_non_finite=skip` passes such batches "
            "by."
        )


def refused_path(run: Run, batch_number: int) -> Path:
    """Where a batch is kept that was refused."""
    return run.config.run / f"refused-batch-{batch_number:06d}.jsonl"


def evaluation_due(run: Run) -> bool:
    """Whether the log lacks an evaluation that belongs here: before the first, after the last, or every so many."""
    every = run.config.evaluation.every
    wanted = run.update in (0, run.config.updates) or (every and run.update % every == 0)
    if not (run.held_out and wanted):
        return False
    return run.ranks.on_first(
        lambda: not any("eval" in row and row["update"] == run.update for row in run.metrics.rows())
    )


def evaluate_held_out(run: Run) -> None:
    """Evaluate on the problems kept apart; the rows stand in the log beside those of the updates."""
    settings = run.config.evaluation
    run.progress.phase("evaluate", len(run.held_out) * (settings.samples + settings.greedy))
    rows, answered = evaluate(
        run.rollout,
        run.held_out,
        run.config,
        update=run.update,
        grader=run.grader,
        advance=run.advance,
        ranks=run.ranks,
    )
    samples = []
    for name, pairs in answered.items():
        responses, scores = zip(*pairs[:SAMPLES_OF_EVALUATION], strict=True)
        samples += sample_rows(responses, scores, run.batch, run.update, f"eval-{name}")
    run.ranks.on_first(lambda: run.log([row | {"batch": run.batch} for row in rows], samples))
    for row in rows:  # last: a reader that went away ends the run here
        run.progress.finish_evaluation(row)
    run.may_stop()
