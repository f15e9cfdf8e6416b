"""The log of a run: files of JSON, a row a line, and what each field of ``metrics.jsonl`` means."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from scaled.errors import UserError
from scaled.files import save_text

UPDATE_FIELDS = {
    "update": "number of the update, from 1; of a skipped batch, the update that it would have been",
    "batch": "number of the batch taken, from 1; skipped batches count too",
    "method": "logra, dense or lora",
    "skipped": "null, or why the batch gave no update",
    "reward": "mean reward of the batch",
    "right": "share of the responses that are right",
    "well_formed": "share of the responses that have the form of an answer, right or wrong",
    "unparseable": "share of the responses in which no answer could be found; these are wrong",
    "grader_failed": "responses that the reward function could not score; they are not trained on",
    "advantage_std": "standard deviation of the advantages over the batch",
    "baseline": "running average of the reward, this batch included",
    "response_tokens": "mean length of the responses, in tokens",
    "truncated": "share of the responses that were cut by the limit of tokens",
    "importance_max": "largest weight π_trainer/π_engine of a token, after the cap",
    "q": "predicted KL of the proposal at α = 1, in nats a token",
    "q_se": "standard error of q over the probe's responses",
    "predicted_kl": "α² q, the predicted KL of the update that was made, in nats a token",
    "realised_kl": "measured KL from the old policy to the new one on the probe's contexts, in nats a token",
    "alpha": "α, the multiplier of the proposal",
    "budget_scheduled": "KL budget of this update by the schedule, in nats a token",
    "budget": "KL budget less the smoothed mismatch of engine and trainer, in nats a token",
    "mismatch_kl": "measured log-probability gap of engine and trainer, in nats a token; null without an engine",
    "log_prob_difference": "mean of |log p_engine − log p_trainer| of a token, in nats; null without an engine",
    "other_version": "share of the responses by other weights than the last; null without an engine",
    "mismatch_smoothed": "running average of mismatch_kl",
    "update_norm": "norm of the update over all trained matrices, α included",
    "weight_norm": "norm of the trained matrices before the update",
    "sketch_norm": "norm of the sketches of all trained matrices",
    "tokens": "prompt and response tokens trained on",
    "seconds_rollout": "seconds of sampling and grading",
    "seconds_train": "seconds of the forward and backward passes",
    "seconds_probe": "seconds of predicting the KL, and of measuring it after the update",
    "seconds_update": "seconds of forming the update and of adding it to the weights",
    "seconds_sync": "seconds of sending the update to the engines; null without an engine",
    "sync_bytes": "bytes sent to the engines; null without an engine",
    "seconds": "seconds of the whole update",
    "peak_bytes": "most memory held so far: of the process on CPU, allocated by torch on GPU",
}
"""The fields of a row of ``metrics.jsonl`` that stands for an update or a skipped batch."""

EVALUATION_FIELDS = {
    "update": "number of the last update before it; 0 before training",
    "batch": "number of the last batch before it",
    "eval": "greedy (the likeliest token each time) or sampled",
    "problems": "held-out problems",
    "samples": "k, responses to each problem",
    "pass_at_1": "share of the responses that are right",
    "interval": "its 95% interval, by bootstrap over the problems",
    "pass_at_k": "share of the problems with a right response among their k",
    "interval_k": "its 95% interval",
    "well_formed": "share of the responses that have the form of an answer, right or wrong",
    "well_formed_interval": "its 95% interval",
    "accuracy_of_well_formed": "share of the well-formed responses that are right",
    "accuracy_of_well_formed_interval": "its 95% interval",
    "truncated": "share of the responses that were cut by the limit of tokens",
    "response_tokens": "mean length of the responses, in tokens",
    "unparseable": "share of the responses in which no answer could be found; these are wrong",
    "grader_failed": "responses that the reward function could not score; they count nowhere else",
    "macro_score": "mean of the tasks' mean scores, each task counting the same; null with fewer than two tasks",
    "macro_score_interval": "its 95% interval, problems drawn within tasks",
    "by_source": "mean score of each task, by the problems' source; null with fewer than two tasks",
    "seconds": "seconds of the evaluation",
}
"""The fields of a row of ``metrics.jsonl`` that stands for an evaluation on held-out problems."""


class JsonLines:
    """A file of strict JSON objects, one a line, each on the disk when ``append`` returns.

    Numbers that JSON does not have are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which
    ``float`` takes. A last line without its newline was being written when the machine stopped: it is left out on
    reading, with a note to the log, and removed by the next ``append``.

    ``trouble`` says what keeps a row from being read, if anything does.
    """

    def __init__(self, path: Path, trouble: Callable[[dict[str, Any]], str | None] = lambda _: None) -> None:
        self.path, self.trouble = path, trouble

    def append(self, row: dict[str, Any]) -> None:
        """Add a row. A full disk is a ``UserError`` and leaves the file as it was; so does a ``TypeError``, raised
        for a value that JSON has no form for."""
        line = json.dumps(_strict(row, "row"), allow_nan=False).encode() + b"\n"
        if self._is_torn():
            self._keep([text for _, text, _ in self._lines()])
        try:
            with self.path.open("ab", buffering=0) as file:
                end = file.tell()
                try:
                    if file.write(line) < len(line):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    os.fsync(file.fileno())
                except OSError:
                    file.truncate(end)
                    raise
        except OSError as error:
            raise UserError(
                f"{self.path} takes no further row: {error.strerror}. Make room on its disk, then resume the run."
            ) from error

    def rows(self) -> list[dict[str, Any]]:
        """All rows; none if there is no file yet. A ``UserError`` for a file that cannot be read, a broken line other
        than a torn last one, and a row with trouble."""
        return [row for _, _, row in self._lines()]

    def rewind(self, batch: int) -> None:
        """Drop the rows of later batches, which a resumed run takes again. The others stay as they are, byte for
        byte."""
        kept = []
        for number, text, row in self._lines():
            if not isinstance(row.get("batch"), int):
                raise UserError(f"{self.path}, line {number}: the row has no number `batch` to resume by; remove it")
            if row["batch"] <= batch:
                kept.append(text)
        if self.path.exists():
            self._keep(kept)

    def _keep(self, lines: list[str]) -> None:
        save_text(self.path, "".join(f"{line}\n" for line in lines))

    def _is_torn(self) -> bool:
        if not self.path.exists() or self.path.stat().st_size == 0:
            return False
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() != b"\n"

    def _lines(self) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """Number from 1, text and row of each line."""
        if not self.path.exists():
            return
        if not self.path.is_file():
            raise UserError(f"{self.path} is no ordinary file, and should be the log of the run; move it away")
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror}; it is the log of the run") from error
        # Not splitlines(): a text may hold U+2028, which JSON allows and Python takes for the end of a line.
        lines = content.split(b"\n")
        tail = lines.pop()
        for number, line in enumerate([*lines, tail] if tail else lines, start=1):
            try:
                row = json.loads(line.decode(), parse_constant=_refuse)
                if not isinstance(row, dict):
                    raise ValueError(f"a {type(row).__name__} where an object belongs")
            except (ValueError, RecursionError) as error:
                if number > len(lines):
                    logging.getLogger(__name__).warning("%s: left out line %d, half written", self.path, number)
                    return
                raise UserError(
                    f"{self.path}, line {number} is broken ({error}): {line[:60]!r}; mend or remove it"
                ) from None
            if trouble := self.trouble(row):
                raise UserError(f"{self.path}, line {number}: {trouble}; mend or remove the line")
            yield number, line.decode(), row


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _strict(value: Any, key: str) -> Any:
    """The value in the types of JSON, with strings for what JSON has no number for."""
    if isinstance(value, dict):
        return {name: _strict(inner, f"{key}.{name}") for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(inner, f"{key}[{i}]") for i, inner in enumerate(value)]
    if isinstance(value, float):
        return value if math.isfinite(value) else json.dumps(float(value))
    if value is None or isinstance(value, str | int):
        return value
    raise TypeError(f"{key} is a {type(value).__name__}, which JSON has no form for: {value!r:.80}")


def peak_bytes(device: torch.device) -> int:
    """The most memory held so far: torch's on a GPU, the process's resident memory on CPU.

    ``ru_maxrss`` of a process also counts what its parent held when it started it; ``VmHWM`` is its own.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
