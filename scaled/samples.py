"""Rows of ``samples.jsonl``: what the model was asked, what it answered, and how that was scored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from scaled.records import Response, Score


def sample_rows(
    responses: Iterable[Response], scores: Iterable[Score], batch: int, update: int, kind: str
) -> Iterator[dict[str, Any]]:
    """One row a response; ``kind`` says where it was sampled: ``train``, ``eval-greedy`` or ``eval-sampled``."""
    for response, score in zip(responses, scores, strict=True):
        yield {
            "batch": batch,
            "update": update,
            "kind": kind,
            "id": response.problem.id,
            "prompt": "\n".join(f"{message['role']}: {message['content']}" for message in response.problem.messages),
            "text": response.text,
            "answer": response.problem.answer,
            "reward": score.reward,
            "outcome": score.outcome,
            "stop_reason": response.stop_reason,
            "tokens": len(response.token_ids),
        }
