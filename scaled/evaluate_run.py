"""``logra eval``: accuracy on the held-out problems, of a run's last checkpoint or of a model before training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from scaled.checkpoint import latest_checkpoint, verify
from scaled.config_file import load_config
from scaled.data import load_data
from scaled.errors import UserError
from scaled.evaluate import evaluate
from scaled.model import load_model
from scaled.progress import RunProgress
from scaled.rewards import Grader
from scaled.rollout.in_process import InProcess

OF_THE_RUN = ("run", "model.path", "method", "updates")


def evaluate_run(target: Path, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Show and return the rows of an evaluation; nothing is written.

    ``target`` is a run's folder, of which the last checkpoint is taken, or a configuration.
    """
    if target.is_dir() and (ignored := [o for o in overrides if o.partition("=")[0] in OF_THE_RUN]):
        raise UserError(f"`{ignored[0]}` cannot be set: of a run's folder its last checkpoint is evaluated, as it is")
    config = load_config(target, overrides)
    source, update = config.model, 0
    if target.is_dir():
        checkpoint = latest_checkpoint(target)
        if checkpoint is None:
            raise UserError(
                f"run {target} has no checkpoint to evaluate; its {target / 'config.yaml'} can be evaluated"
            )
        verify(checkpoint)
        source = source.model_copy(update={"path": str(checkpoint / "model")})
        update = int(checkpoint.name.rpartition("-")[2])
    if config.threads:
        torch.set_num_threads(config.threads)
    _, held_out = load_data(config.data, config.seed)
    with Grader(config) as grader, RunProgress(config.updates, update) as progress:
        model, tokenizer = load_model(source)
        settings = config.evaluation
        progress.phase("evaluate", len(held_out) * (settings.samples + settings.greedy))
        rollout = InProcess(model, tokenizer, config)
        rows, _ = evaluate(rollout, held_out, config, update=update, grader=grader, advance=progress.advance)
        for row in rows:
            progress.finish_evaluation(row)
    return rows
