"""Draws entries of one task of reasoning-gym: a program by itself, which imports nothing of this project.

codeio executes programs that come with the package: they print, write files, end the process, change what is global.
So every task has a process, which starts in an empty folder and with nothing of the caller's environment. It is given
JSON as its argument, and prints a list of JSON a line: [name of the draw, index, entry, reason why there is none].
"""

from __future__ import annotations

import json
import math
import numbers
import os
import random
import re
import resource
import signal
import sys
from typing import Any

ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}")
SECONDS = 60  # for one entry; the slowest takes about one
LARGEST_FILE = 1 << 26


class TooLong(BaseException):
    """No Exception, since the package goes on after each of those."""


def draw(task: str, draws: dict[str, tuple[int, int]], left_out: dict[str, str], out: Any) -> None:
    """``draws`` has the first seed and the number of entries by name; item i is drawn from seed + i.

    ``left_out`` has the programs of codeio that are not run, by their digest, and why.
    """
    import numpy
    import reasoning_gym

    def end(*_: object) -> None:
        raise TooLong

    signal.signal(signal.SIGALRM, end)
    for name, (seed, count) in draws.items():
        dataset = reasoning_gym.create_dataset(task, size=count, seed=seed)
        for index in range(count):
            # Some programs of codeio draw from the global generators.
            random.seed(seed + index)
            numpy.random.seed((seed + index) % 2**32)
            signal.alarm(SECONDS)
            try:
                found, reason = entry(dataset, index, seed, left_out if task == "codeio" else {})
            except TooLong:
                found, reason = None, f"fault: it takes more than {SECONDS} s"
            except (KeyboardInterrupt, BrokenPipeError):
                raise
            except BaseException as error:  # SystemExit too: the programs are not ours
                found, reason = None, f"fault: {type(error).__name__}: {error}"
            signal.alarm(0)
            out.write(json.dumps([name, index, found, reason]) + "\n")
            out.flush()


def entry(dataset: Any, index: int, seed: int, left_out: dict[str, str]) -> tuple[dict[str, Any] | None, str]:
    """An entry in JSON's types, or the reason to leave it out."""
    if left_out:
        # The first thing that codeio draws is the program.
        code = random.Random(seed + index).choice(dataset._jsonl_data)["code_sample"]
        if digest(code) in left_out:
            return None, left_out[digest(code)]
    found = dataset[index]
    found = plain({name: found[name] for name in ("question", "answer", "metadata")})
    text = found["answer"] + json.dumps(found["metadata"])  # the question has the program too, as it always is
    if ADDRESS.search(text):
        return None, "address in memory"
    if os.getcwd() in text:
        return None, "temporary file"
    return found, ""


def digest(code: str) -> str:
    """Names a program."""
    import hashlib

    return hashlib.blake2b(code.encode(), digest_size=6).hexdigest()


def plain(value: Any) -> Any:
    """A value in JSON's types: lists for tuples and arrays, Python's numbers for numpy's and sympy's, texts for NaN.

    Raises ``TypeError`` for what JSON has nothing for.
    """
    if isinstance(value, dict):
        if any(not isinstance(key, str | int | float | bool | None) for key in value):
            raise TypeError(f"a key of the metadata is no text and no number: {list(value)[:3]!r:.100}")
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else str(float(value))
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    raise TypeError(f"the metadata holds a {type(value).__name__}, which JSON has nothing for")


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    rows = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        draw(asked["task"], asked["draws"], asked["left_out"], rows)
        rows.write(json.dumps(["", 0, None, ""]) + "\n")
    except Exception as error:
        rows.write(json.dumps(["", 0, None, f"{type(error).__name__}: {error}"]) + "\n")
    rows.flush()
    os._exit(0)  # whatever threads the programs left
