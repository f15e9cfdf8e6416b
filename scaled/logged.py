"""What a run has logged so far, as reports read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from scaled.config import RunConfig
from scaled.config_file import load_config
from scaled.errors import UserError
from scaled.log_rows import metrics_log


class LoggedRun(NamedTuple):
    """A run's folder, its configuration, and the rows of its log by kind; ``updates`` are the batches not skipped."""

    folder: Path
    config: RunConfig
    batches: list[dict[str, Any]]
    updates: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]


def read_run(folder: Path) -> LoggedRun:
    """Read a run's folder, finished or not. Raises ``UserError`` for one without a log or with a broken one."""
    rows = metrics_log(folder).rows()
    if not rows:
        raise UserError(
            f"{folder} has no metrics.jsonl with a row in it, so there is nothing to report; is it a run's folder?"
        )
    batches = [row for row in rows if "eval" not in row]
    return LoggedRun(
        folder,
        load_config(folder / "config.yaml"),
        batches,
        [row for row in batches if not row["skipped"]],
        [row for row in rows if row.get("pass_at_1") is not None],
    )
