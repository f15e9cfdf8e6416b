"""A worker: the command ``logra`` with a fault in rank 1, named by $FAULT."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from typing import Any

import logra_ref.projection
import scaled.gradients
import scaled.ranks
import scaled.train
from scaled.cli import main

FAULT, RANK = os.environ["FAULT"], os.environ.get("RANK", "0")
loss, take_batch = scaled.gradients.policy_loss, scaled.train.take_batch


def not_a_number(*arguments: Any) -> Any:
    return loss(*arguments) * float("nan")


def dies_in_the_third(run: Any) -> Any:
    if run.batch == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return take_batch(run)


def is_asked_to_stop(run: Any) -> Any:
    if run.batch == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return take_batch(run)


if FAULT == "alone":
    scaled.ranks.GATHERING = timedelta(seconds=3)
if RANK == "1" and FAULT == "settings":
    sys.argv.append("seed=7")
if RANK == "1" and FAULT == "nan":
    scaled.gradients.policy_loss = not_a_number
if RANK == "1" and FAULT == "projections":
    logra_ref.projection.DOMAIN = "another version"
if RANK == "1" and FAULT == "dies":
    scaled.train.take_batch = dies_in_the_third
if RANK == "1" and FAULT == "stop":
    scaled.train.take_batch = is_asked_to_stop
if __name__ == "__main__":  # the grader's workers import this too
    main()
