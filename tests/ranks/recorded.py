"""A worker: the command ``logra`` whose rollouts are those that another run recorded.

What is sampled depends on rounding, and so on who computes it together with what; a comparison of training has to
start from the same responses. ``$RECORD`` is the file to write, ``$REPLAY`` that to read.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import scaled.train
from scaled.cli import main

answer = scaled.train.answer
batches: list[Any] = pickle.loads(Path(os.environ["REPLAY"]).read_bytes()) if "REPLAY" in os.environ else []


def recording(*arguments: Any, **settings: Any) -> Any:
    batches.append(answer(*arguments, **settings))
    Path(os.environ["RECORD"]).write_bytes(pickle.dumps(batches))
    return batches[-1]


def replaying(*arguments: Any, **settings: Any) -> Any:
    return batches.pop(0)


if __name__ == "__main__":
    scaled.train.answer = replaying if batches else recording
    main()
