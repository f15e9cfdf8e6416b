"""Where responses come from: the trainer's own process, or vLLM engines that follow it. Both offer the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from scaled.records import Problem, Response


@dataclass(frozen=True)
class SyncCost:
    """What it took to bring the engines to the weights of an update."""

    seconds: float
    sync_bytes: int


class Rollout(Protocol):
    """``follow`` and ``saved`` are for all ranks together, ``respond`` for each on its own.

    ``share`` are those of ``count`` problems, by index, that this rank has to ask; all ranks' shares are all of them.
    After ``follow`` responses come from the weights after ``update``. A ``top_p`` below 1 is for evaluation alone: the
    probabilities that the trainer computes are those of all tokens. ``saved`` tells of a checkpoint, in whose folder
    the model has them. ``cost`` is that of the last sync, once, or None where there was none.
    ``close`` when the run is left.
    """

    def share(self, count: int) -> Sequence[int]: ...
    def follow(self, update: int) -> None: ...
    def respond(
        self,
        problems: Sequence[Problem],
        numbers: Sequence[int],
        *,
        temperature: float,
        top_p: float = 1.0,
        seed: int,
        advance: Callable[[int], None],
    ) -> list[Response]: ...
    def saved(self, update: int, model: Path) -> None: ...
    def cost(self) -> SyncCost | None: ...
    def close(self) -> None: ...
