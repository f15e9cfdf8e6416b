"""Several holders of rows in one process: threads that wait for each other at every sum."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from logra_ref.holding import Holding, Total


class Part(Holding):
    """A holder of some rows of which only the sums are asked for."""

    def __init__(self, total: Total) -> None:
        self.total = total


def each_holder(work: Callable[[int, Total], Any], count: int) -> list[Any]:
    """The results of ``work(holder, total)``; ``total`` returns the sum over holders of what each hands in."""
    meeting = threading.Barrier(count, timeout=60)
    handed_in: list[Tensor | None] = [None] * count

    def run(holder: int) -> Any:
        def total(x: Tensor) -> Tensor:
            handed_in[holder] = x
            meeting.wait()
            summed = sum(handed_in[1:], start=handed_in[0])
            meeting.wait()  # nobody hands in the next before all have read this
            return summed

        return work(holder, total)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))
