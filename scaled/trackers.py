"""TensorBoard and Weights & Biases: the numbers of ``metrics.jsonl``, for those who watch them there.

By the packages' own interfaces: accelerate's trackers want its process state, which sets threads and the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

from scaled.config import RunConfig
from scaled.errors import UserError
from scaled.files import discard


class Tracker(NamedTuple):
    """Where numbers go: ``log`` takes them by name with their update, ``close`` writes what is left."""

    name: str
    log: Callable[[dict[str, float], int], None]
    close: Callable[[], None]


def require_packages(trackers: Sequence[str]) -> None:
    """Raises ``UserError`` for a tracker whose package is not installed."""
    for name in trackers:
        found = find_spec(name)
        if found is None or found.origin is None:  # a mere folder, such as what wandb leaves where it ran, has none
            raise UserError(f"trackers has {name}, which is not installed: pip install {name}, or leave it out")


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """Every number of a row of ``metrics.jsonl`` by its name: ``reward``; of an evaluation ``eval/greedy/pass_at_1``,
    and the ends of its intervals ``…/interval/low`` and ``…/interval/high``."""
    return dict(_numbers(row, f"eval/{row['eval']}/" if "eval" in row else ""))


def _numbers(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, list | tuple) and len(value) == 2:
            yield from _numbers({"low": value[0], "high": value[1]}, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", value


@contextmanager
def opened_trackers(config: RunConfig, *, update: int, resume: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Takes rows of ``metrics.jsonl`` to the trackers of the run, each at its update; for the first rank alone.

    A run that is resumed after ``update`` goes on with what is there; what came later is taken again. A tracker that
    cannot be started is a ``UserError``; one that fails later is named once in a warning and left alone from then on.
    """
    trackers: list[Tracker] = []
    for name in dict.fromkeys(config.trackers):
        try:
            trackers.append(STARTS[name](config, update, resume))
        except Exception as error:  # of whatever class their packages have
            for tracker in trackers:
                tracker.close()
            if not resume:  # a folder without a checkpoint would be in the way of the next start
                for made in config.trackers:
                    discard(config.run / made)
            remedy = ", set WANDB_MODE=offline" if name == "wandb" else ""
            raise UserError(f"{name} cannot be started ({error}); mend that{remedy}, or leave it out") from error

    def every(work: Callable[[Tracker], None]) -> None:
        for tracker in tuple(trackers):
            try:
                work(tracker)
            except Exception as error:
                trackers.remove(tracker)
                logging.getLogger(__name__).warning(
                    "%s has failed and gets no further numbers; the run goes on: %s", tracker.name, error
                )

    try:
        yield lambda row: every(lambda tracker: tracker.log(numbers(row), row["update"]))
    finally:
        every(lambda tracker: tracker.close())


def _tensorboard(config: RunConfig, update: int, resume: bool) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(config.run / "tensorboard"), purge_step=update + 1 if resume else None)

    def log(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return Tracker("tensorboard", log, writer.close)


def _wandb(config: RunConfig, update: int, resume: bool) -> Tracker:
    import wandb

    # Its folder for a run, offline or not, is named by date and id.
    before = sorted((config.run / "wandb").glob("*run-*-*"))
    run = wandb.init(
        project="logra",
        name=config.run.resolve().name,
        dir=str(config.run),
        config=config.model_dump(mode="json"),
        id=before[0].name.rpartition("-")[2] if before else None,
        resume="allow" if resume else None,
        settings=wandb.Settings(console="off"),  # stdout has the bars of the run
    )
    # By the update as a number of its own: W&B drops what comes at a step that it has passed.
    run.define_metric("*", step_metric="update")
    return Tracker("wandb", lambda values, step: run.log(values | {"update": step}), run.finish)


STARTS: dict[str, Callable[[RunConfig, int, bool], Tracker]] = {"tensorboard": _tensorboard, "wandb": _wandb}
