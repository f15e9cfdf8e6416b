"""Worker processes with a time limit for each task; those that hang or die are replaced."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import Any

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from scaled.graders.worker import SURVIVED, load_alone, load_problem

WORKER_START_SECONDS = 120.0
WORKER_DOUBT_SECONDS = 15.0  # after which a start is looked into
WORKER_END_SECONDS = 3.0
MAX_WORKERS = 4


class WorkerPool:
    """Processes that have each run ``load(*arguments)``; ``replaced`` counts those that hung or died at a task."""

    def __init__(self, load: Callable[..., None], arguments: tuple[Any, ...], timeout: float) -> None:
        self._load, self._arguments, self._timeout = load, arguments, timeout
        self._pool: ProcessPool | None = None
        self.replaced = 0

    def start(self) -> None:
        """Start the processes."""
        # Spawned, not forked: a fork copies the locks of torch's threads without the threads that would release them.
        self._pool = ProcessPool(
            max_workers=min(MAX_WORKERS, os.cpu_count() or 1),
            initializer=self._load,
            initargs=self._arguments,
            context=multiprocessing.get_context("spawn"),
        )

    def stop(self) -> None:
        """End the processes, in any state."""
        if self._pool is not None:
            self._pool.close()
            try:  # a worker that is only starting would complain, on the screen, that its parent is gone
                self._pool.join(timeout=WORKER_END_SECONDS)
            except TimeoutError:
                self._pool.stop()
                self._pool.join()
            self._pool = None

    def why_not_loaded(self) -> str:
        """Wait until a process has loaded; what went wrong, or nothing."""
        future = self._pool.schedule(load_problem)
        wait([future], timeout=WORKER_DOUBT_SECONDS)
        code = SURVIVED if future.done() else self._exit_code_of_a_load()
        if code == SURVIVED:
            wait([future], timeout=WORKER_START_SECONDS)
        if code not in (SURVIVED, None):
            return f"importing it ends its process (exit code {code})"
        if not future.done():
            return f"importing it takes longer than {WORKER_START_SECONDS:g} s"
        if (error := future.exception()) is not None:
            return f"importing it ended the worker process ({error})"
        return future.result()

    def map(
        self, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], failure: Callable[[str], Any]
    ) -> list[Any]:
        """What ``function`` returns for each task, in order; ``failure(reason)`` where its process hung or died."""
        results: list[Any] = [None] * len(tasks)
        for _attempt in range(2):
            todo = [index for index, result in enumerate(results) if result is None]
            try:
                futures = [self._pool.schedule(function, args=tasks[i], timeout=self._timeout) for i in todo]
            except RuntimeError:  # the pool broke since the last batch, e.g. an idle worker was killed for its memory
                futures = []
            for index, future in zip(todo, futures, strict=False):
                results[index] = self._result(future, failure)
                if results[index] is None:
                    break
            if None not in results:
                break
            self.stop()
            self.start()
        return [failure("the worker processes broke down twice") if result is None else result for result in results]

    def _exit_code_of_a_load(self) -> int | None:
        """The pool replaces a worker that dies while it starts, without a word: a process apart shows it.

        ``SURVIVED`` if it does not die, None if it takes too long.
        """
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=load_alone, args=(self._load, self._arguments))
        process.start()
        process.join(WORKER_START_SECONDS)
        code = process.exitcode
        process.kill()
        process.join()
        return code

    def _result(self, future: ProcessFuture, failure: Callable[[str], Any]) -> Any:
        """Wait for a result; None if the pool itself is lost and has to be started anew."""
        # Tasks start in order, so the one waited for is running, or waits at most for a worker to be replaced.
        wait([future], timeout=self._timeout + WORKER_START_SECONDS)
        if not future.done():
            return None
        error = future.exception()
        if error is None:
            return future.result()
        if isinstance(error, TimeoutError):
            self.replaced += 1
            return failure(f"took longer than rewards.timeout={self._timeout:g} s")
        if isinstance(error, ProcessExpired):
            self.replaced += 1
            return failure(f"ended its process (exit code {error.exitcode})")
        return None
