"""The answers of an evaluation, in a file that grows as they come, so that an interrupted one goes on from there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from scaled.config import RunConfig
from scaled.config_file import settings_of
from scaled.errors import UserError
from scaled.metrics import JsonLines
from scaled.records import Problem, Response, Score

FIELDS = ("kind", "id", "sample", *(field.name for field in fields(Score)), "response_tokens", "truncated", "text")
BEGINNING = b'{"evaluation"'


@dataclass(frozen=True)
class Kept:
    """What is kept of a response and its score."""

    problem: Problem
    length: int
    truncated: bool
    score: Score


class AnswerLog:
    """A file of rows: first what was evaluated and how, then an answer a row, in the order in which they came."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        """Raises ``UserError`` for a file of another evaluation, and for one that cannot be read."""
        self._rows = JsonLines(path, _trouble)
        self.path, rows = path, self._rows.rows()
        foreign = not rows and path.exists() and not BEGINNING.startswith(path.read_bytes()[: len(BEGINNING)])
        if foreign or len(rows) > 1 or (rows and "evaluation" not in rows[0]):
            _require_same(path, rows[0].get("evaluation") if rows else None, json.loads(json.dumps(about)))
        else:  # there is none, or one of which nothing was answered
            path.unlink(missing_ok=True)
            self._rows.append({"evaluation": about})
        self._found = {(row["kind"], row["id"], row["sample"]): row for row in rows[1:]}

    def get(self, kind: str, problem: Problem, sample: int) -> Kept | None:
        """An answer that is there."""
        row = self._found.get((kind, problem.id, sample))
        if row is None:
            return None
        score = Score(row["reward"], row["outcome"], row["well_formed"], row["reason"], row["credit"])
        return Kept(problem, row["response_tokens"], row["truncated"], score)

    def add(self, kind: str, sample: int, response: Response, score: Score) -> None:
        """Write an answer, unless it is there."""
        row = {
            "kind": kind,
            "id": response.problem.id,
            "source": response.problem.source,
            "sample": sample,
            **asdict(score),
            "response_tokens": response.length,
            "truncated": response.truncated,
            "text": response.text,
        }
        if (key := (kind, response.problem.id, sample)) not in self._found:
            self._rows.append(row)
            self._found[key] = row


def about(config: RunConfig, problems: Sequence[Problem], model: str) -> dict[str, Any]:
    """What an evaluation's answers and scores depend on; ``model`` stands for the weights."""
    every = config.model_dump(mode="json")
    rows = json.dumps([asdict(problem) for problem in problems], sort_keys=True).encode()
    return {
        "model": model,
        "problems": hashlib.sha256(rows).hexdigest(),
        **{name: every[name] for name in ("seed", "reward", "rewards", "evaluation")},
        "rollout": {name: every["rollout"][name] for name in ("backend", "max_new_tokens", "context", "stop")},
        "dtype": config.engine.dtype if config.rollout.backend == "vllm" else config.model.compute_dtype,
    }


def _trouble(row: dict[str, Any]) -> str | None:
    missing = [] if "evaluation" in row else [name for name in FIELDS if name not in row]
    return f"the row has no `{missing[0]}`" if missing else None


def _require_same(path: Path, before: object, now: dict[str, Any]) -> None:
    if not isinstance(before, dict):
        raise UserError(f"{path} is no file of an evaluation's answers; name another by --out")
    old, new = dict(settings_of(before)), dict(settings_of(now))
    if changed := [f"{key} = {old.get(key)!r}, and now it is {new[key]!r}" for key in new if old.get(key) != new[key]]:
        raise UserError(
            f"{path} has answers of another evaluation: {'; '.join(changed)}. Move it away, or name another by --out"
        )
