"""A training step of LoGRA beside dense Adam, LoRA, GaLore and APOLLO: seconds, peak memory, operations, the bound.

Every method has a process of its own, with the same model and the same batches; they take their steps in turn, so
that whatever else the machine does meets all of them. A step is forward, backward and update. The probe, which only
LoGRA has, is measured by ``bench probe``.

Operations are those that ``costs`` counts while a step runs. The bound is what a method's ratio to
dense would be if time went by operations alone: those that every method has to do (``frozen``) and, for LoGRA,
n r (d + k) pairs for a matrix's sketch and r d k for its update, in place of n d k for its gradient (a pair is one
multiplication and one addition, 2 operations; n is the batch's tokens).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.profiler import record_function

from scaled.bench import allocations
from scaled.bench.contenders import PEERS, RANKED, Contender, open_contender
from scaled.bench.costs import operations_counter
from scaled.bench.phases import failure
from scaled.bench.smoke_run import RESPONSES, made_up
from scaled.errors import UserError
from scaled.gradients import accumulate_gradients

WARM = 2  # steps that are not timed: memory is recorded in them, and the second has the moments of the first
# glibc gives large blocks back to the system and gets them anew, page by page, which costs more than what is measured.
KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**26)}
PARTS = ("forward and backward", "update")


def compare(
    names: Sequence[str], model: str, *, tokens: int, repeats: int, checkpointing: bool, peers: Path
) -> dict[str, Any]:
    """What ``figures`` says of every contender, measured in turn; ``left_out`` are the peers that the folder ``peers``
    lacks. Raises ``UserError`` if a contender cannot be measured."""
    left_out = [name for name in names if not _installed(name, peers)]
    names = [name for name in names if name not in left_out]
    with ExitStack() as stack:
        workers, found = {}, {}
        for name in names:  # one is ready before the next begins: together they would take each other's memory
            arguments = [name, model, str(tokens), str(int(checkpointing))]
            workers[name] = stack.enter_context(_worker(arguments, peers))
            found[name] = _answer(name, workers[name])
        for _ in range(repeats):
            for name, worker in workers.items():
                worker.stdin.write("step\n")
                worker.stdin.flush()
                for part, seconds in _answer(name, worker).items():
                    found[name].setdefault("seconds", {}).setdefault(part, []).append(seconds)
    batch = RESPONSES * (tokens - 1)  # from the last token of a sequence nothing is predicted
    setting = {"model": model, "tokens": batch, "threads": torch.get_num_threads(), "left_out": left_out}
    return figures(found, batch) | setting


def contenders_of(text: str) -> list[str]:
    """``METHOD`` or ``METHOD:RANK`` by commas; ``frozen`` and ``dense``, of which the ratios are, come first.

    Raises ``UserError`` for what is none.
    """
    names = list(dict.fromkeys(["frozen", "dense", *filter(None, text.split(","))]))
    for name in names:
        method, colon, rank = name.partition(":")
        known = method in RANKED and rank.isdecimal() and int(rank) > 0 if colon else method in ("frozen", "dense")
        if not known:
            raise UserError(
                f"no method {name!r} can be measured; give frozen, dense or one of {', '.join(RANKED)} with a rank, as "
                "in logra:64"
            )
    return names


def figures(found: dict[str, dict[str, Any]], tokens: int) -> dict[str, Any]:
    """Medians, spreads, and the ratios to dense with their bounds, of what the workers have answered for batches of so
    many ``tokens``."""
    taken = {
        name: [sum(parts) for parts in zip(*(row["seconds"][part] for part in PARTS), strict=True)]
        for name, row in found.items()
    }
    ratios = {
        name: [own / dense for own, dense in zip(seconds, taken["dense"], strict=True)]
        for name, seconds in taken.items()
    }
    common, shapes = found["frozen"]["operations"], found["dense"]["shapes"]
    needed = {name: needed_operations(name, common, shapes, tokens) for name in found}
    return {
        "seconds": {name: statistics.median(seconds) for name, seconds in taken.items()},
        "seconds_by_part": {
            name: {part: statistics.median(row["seconds"][part]) for part in PARTS} for name, row in found.items()
        },
        "ratio_to_dense": {name: statistics.median(each) for name, each in ratios.items()},
        "spread_of_ratio": {name: [min(each), max(each)] for name, each in ratios.items()},
        "operations": {name: row["operations"] for name, row in found.items()},
        "operations_needed": needed,
        "bound": {name: count / needed["dense"] for name, count in needed.items() if count},
        "peak_bytes": {name: row["peak_bytes"] for name, row in found.items()},
        "weight_bytes": {name: row["weight_bytes"] for name, row in found.items()},
        "repeats": len(taken["dense"]),
    }


def needed_operations(name: str, common: int, shapes: Sequence[tuple[int, int]], tokens: int) -> int | None:
    """The operations that a method cannot do without, from the ``common`` ones and the trained matrices' shapes; None
    for the peers, whose own count is all there is."""
    method, _, given = name.partition(":")
    r = int(given or 0)
    if method == "frozen":
        return common
    if method == "dense":
        return common + sum(2 * tokens * d * k for d, k in shapes)
    if method in ("logra", "logra-sgd"):
        return common + sum(2 * tokens * r * (d + k) + 2 * r * d * k for d, k in shapes)
    if method == "lora":  # into the adapter and out of it; the same for its input, and for the two factors' gradients
        return common + sum(6 * tokens * r * (d + k) for d, k in shapes)
    return None


def work(name: str, model: str, tokens: int, checkpointing: bool) -> None:
    """Be the process of one contender: answer once with memory and operations, then a line for every line read."""
    torch.manual_seed(0)
    with allocations.recorded() as record:
        contender = open_contender(name, model, checkpointing=checkpointing)
        allocations.own_weights(contender.run.policy)
        for number in range(WARM):
            with record_function(f"step {number}"):
                _step(contender, tokens, number)
    network = contender.run.model
    weights = list(network.parameters())
    with operations_counter() as counter:
        _step(contender, tokens, WARM)
    _say(
        {
            "peak_bytes": dict(allocations.peaks(record, "step "))[f"step {WARM - 1}"],
            "weight_bytes": sum(weight.numel() * weight.element_size() for weight in weights),
            "operations": counter.get_total_flops(),
            "shapes": [tuple(weight.shape) for weight in weights if weight.requires_grad],
        }
    )
    del record
    for number, _ in enumerate(sys.stdin, start=WARM + 1):
        _say(_step(contender, tokens, number))


def _step(contender: Contender, tokens: int, number: int) -> dict[str, float]:
    """A step on a batch of two sequences, and the seconds of its parts."""
    responses, advantages = made_up(contender.run.model.config.vocab_size, tokens, number)
    started = perf_counter()
    accumulate_gradients(contender.run, responses, advantages)
    trained = perf_counter()
    contender.update()
    return dict(zip(PARTS, (trained - started, perf_counter() - trained), strict=True))


def _installed(name: str, peers: Path) -> bool:
    package = PEERS.get(name.partition(":")[0])
    return package is None or (peers / package).is_dir()


@contextmanager
def _worker(arguments: list[str], peers: Path) -> Iterator[subprocess.Popen[str]]:
    """The process of one contender, which ends with the context."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(peers.resolve())]))
    process = subprocess.Popen(
        [sys.executable, "-m", "scaled.bench.step", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | KEEPING | {"PYTHONPATH": path},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _answer(name: str, worker: subprocess.Popen[str]) -> dict[str, Any]:
    if line := worker.stdout.readline():
        return json.loads(line)
    _, stderr = worker.communicate()
    reason = failure(subprocess.CompletedProcess([], worker.returncode, "", stderr))
    raise UserError(f"measuring {name} failed: {reason}")


def _say(figures: dict[str, Any]) -> None:
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    try:
        work(sys.argv[1], sys.argv[2], int(sys.argv[3]), bool(int(sys.argv[4])))
    except UserError as error:  # without a traceback, as the caller shows what is written here
        sys.exit(str(error))
