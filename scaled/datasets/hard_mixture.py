"""Reasoning-Gym Hard, the paper's mixture of eight tasks (Table 3): candidates are drawn, equal questions removed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Table

from scaled.data import RowError, read_row
from scaled.datasets import draw
from scaled.datasets.codeio_programs import LEFT_OUT
from scaled.datasets.rows import Faults, library, line
from scaled.errors import UserError
from scaled.files import save_lines, save_text
from scaled.records import Problem

# Training and evaluation problems of Table 3, in its order.
TABLE_3 = {
    "codeio": (4868, 25),
    "emoji_mystery": (4752, 22),
    "rectangle_count": (5000, 25),
    "word_ladder": (4994, 25),
    "pool_matrix": (5000, 25),
    "tsumego": (5000, 25),
    "sentence_reordering": (4334, 21),
    "manipulate_matrix": (5000, 25),
}
SLOWEST_FIRST = ("codeio", "word_ladder", "rectangle_count")
EVALUATION = 25
# Item i is drawn from seed + i: the two draws have no seed in common as long as there are fewer candidates than this.
APART = 1_000_000
SPLITS = ("train", "eval")
FAULT = "fault: "  # as draw.py begins the reason of an entry that it could not make

# (draw, index, entry or None, reason why there is none)
Drawn = tuple[str, int, dict[str, Any] | None, str]


@dataclass
class Counts:
    """What became of a task's candidates, of training and of evaluation."""

    task: str
    train: int = 0
    evaluation: int = 0
    repeated: int = 0  # training questions that an earlier one equals
    repeated_evaluation: int = 0
    overlap: int = 0  # evaluation questions that are in training
    left_out: dict[str, int] = field(default_factory=dict)  # training entries that cannot be repeated, by reason
    left_out_evaluation: int = 0
    faults: Faults = field(default_factory=Faults)


def select(drawn: Iterable[Drawn], counts: Counts) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Which entries stay: of equal training questions the first, and of evaluation those that no entry equals.

    Overlaps leave the evaluation: only so do Table 3's 22 and 21 come about, as 25 questions hardly ever repeat one
    another. The training draw has to come first.
    """
    train: set[bytes] = set()
    evaluation: set[bytes] = set()
    for split, index, entry, reason in drawn:
        if entry is None:
            if reason.startswith(FAULT):
                counts.faults.add(f"{counts.task}, {split} {index}", reason.removeprefix(FAULT))
            elif split == "train":
                counts.left_out[reason] = counts.left_out.get(reason, 0) + 1
            else:
                counts.left_out_evaluation += 1
            continue
        key = hashlib.blake2b(entry["question"].encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if split == "train":
            if key in train:
                counts.repeated += 1
                continue
            train.add(key)
            counts.train += 1
        else:
            if key in train:
                counts.overlap += 1
                continue
            if key in evaluation:
                counts.repeated_evaluation += 1
                continue
            evaluation.add(key)
            counts.evaluation += 1
        yield split, index, entry


def entries(task: str, draws: dict[str, tuple[int, int]], stop: threading.Event | None = None) -> Iterator[Drawn]:
    """The entries of each draw, (first seed, number) by name, from a process of its own.

    Raises ``UserError`` if it ends before its time. Once ``stop`` is set it is ended, and there are no more.
    """
    asked = json.dumps({"task": task, "draws": draws, "left_out": LEFT_OUT})
    command = [sys.executable, "-P", draw.__file__, asked]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="logra-data-", ignore_cleanup_errors=True))
        # The order of sets of texts, which some tasks walk through, follows from the hash's seed.
        kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        alone = kept | {"HOME": folder, "TMPDIR": folder, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
        alone |= {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
        child = stack.enter_context(
            subprocess.Popen(command, cwd=folder, env=alone, stdout=subprocess.PIPE, text=True, encoding="utf-8")
        )
        stack.callback(child.kill)
        for text in child.stdout or ():
            if stop is not None and stop.is_set():
                return
            name, index, entry, reason = json.loads(text)
            if not name:
                if reason:
                    raise UserError(f"reasoning-gym cannot draw {task}: {reason}; try `make data`, or another seed")
                return
            yield name, index, entry, reason
        raise UserError(f"the process that draws {task} ended by exit code {child.wait()}; call this again to go on")


def make(
    folder: Path,
    console: Console,
    *,
    seed: int = 42,
    candidates: int = 5000,
    evaluation: int = EVALUATION,
    tasks: Iterable[str] = tuple(TABLE_3),
) -> list[Counts]:
    """Write train.jsonl and eval.jsonl into the folder, task after task; their bytes follow from the arguments alone.

    Each task that is done is kept in a folder beside them until all are, so that a call after an interruption goes on.
    Raises ``UserError`` if the package is missing, a task cannot be drawn or the folder cannot be written.
    """
    if candidates > APART:
        raise UserError(f"{candidates:,} candidates reach into the evaluation's seeds; ask for {APART:,} at most")
    prompt = library("reasoning_gym.utils").SYSTEM_PROMPTS["DeepSeekZero"]
    draws = {"train": (seed, candidates), "eval": (seed + APART, evaluation)}
    setting = json.dumps([draws, prompt, version("reasoning-gym"), LEFT_OUT])
    parts = folder / f".parts-{hashlib.blake2b(setting.encode(), digest_size=6).hexdigest()}"
    try:
        parts.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror}; name another folder") from error
    tasks = tuple(tasks)
    stop = threading.Event()
    with (
        Progress(
            *Progress.get_default_columns()[:2],
            MofNCompleteColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        ) as bars,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        waiting = [
            pool.submit(_make_task, task, draws, prompt, parts, bars, stop)
            for task in sorted(tasks, key=lambda task: SLOWEST_FIRST.index(task) if task in SLOWEST_FIRST else 9)
        ]
        try:
            for done in as_completed(waiting):
                done.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    for split in SPLITS:
        save_lines(folder / f"{split}.jsonl", _all_lines([parts / f"{task}.{split}" for task in tasks]))
    counts = [_read_counts(parts / f"{task}.json") for task in tasks]
    for old in folder.glob(".parts-*"):
        shutil.rmtree(old, ignore_errors=True)
    return counts


def _all_lines(files: list[Path]) -> Iterator[str]:
    for file in files:
        with file.open(encoding="utf-8", newline="") as part:
            yield from part


def _make_task(
    task: str, draws: dict[str, tuple[int, int]], prompt: str, parts: Path, bars: Progress, stop: threading.Event
) -> None:
    """Write the task's two parts, and then its counts, which say that both are there."""
    if (parts / f"{task}.json").exists() or stop.is_set():
        return
    counts = Counts(task)
    bar = bars.add_task(task, total=sum(count for _, count in draws.values()))

    def readable() -> Iterator[Drawn]:
        for split, index, entry, reason in entries(task, draws, stop):
            bars.advance(bar)
            try:
                if entry is not None:
                    _problem(task, split, index, entry, prompt)
            except RowError as error:
                entry, reason = None, f"{FAULT}{error}"
            yield split, index, entry, reason

    evaluation = []

    def train() -> Iterator[str]:
        for split, index, entry in select(readable(), counts):
            text = line(_problem(task, split, index, entry, prompt))
            if split == "train":
                yield text
            else:
                evaluation.append(text)

    save_lines(parts / f"{task}.train", train())
    save_lines(parts / f"{task}.eval", evaluation)
    if stop.is_set():
        return
    if not counts.train:
        raise UserError(f"reasoning-gym gives nothing to train on for {task}\n{counts.faults.text()}")
    save_text(parts / f"{task}.json", json.dumps(asdict(counts)))
    bars.console.print(f"{task}: {counts.train:,} to train on, {counts.evaluation} to evaluate on", soft_wrap=True)


def _problem(task: str, split: str, index: int, entry: dict[str, Any], prompt: str) -> Problem:
    """The package's own system prompt asks for the tags in which its scorers' answers are looked for."""
    messages = [{"role": "system", "content": prompt}, {"role": "user", "content": entry["question"]}]
    row = {"messages": messages, "answer": entry["answer"], "verifier": "reasoning-gym", "source": task}
    return read_row(row | {"metadata": {"dataset": task, "entry": entry}}, f"{task}/{split}-{index}")


def _read_counts(file: Path) -> Counts:
    found = json.loads(file.read_text(encoding="utf-8"))
    return Counts(**found | {"faults": Faults(**found["faults"])})


def show(found: list[Counts], console: Console, candidates: int) -> None:
    """Print the counts beside Table 3's, and why they differ."""
    names = ("repeats", "left out", "train", "paper", "shared", "eval", "paper")
    table = Table("task", *names, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in table.columns[1:]:
        column.justify = "right"
    for counts in found:
        left_out = sum(counts.left_out.values()) + counts.faults.count
        paper = TABLE_3[counts.task]
        numbers = [counts.repeated, left_out, counts.train, paper[0], counts.overlap, counts.evaluation, paper[1]]
        table.add_row(counts.task, *(f"{number:,}" for number in numbers))
    totals = [sum(counts.train for counts in found), sum(counts.evaluation for counts in found)]
    of_paper = [sum(column) for column in zip(*(TABLE_3[counts.task] for counts in found), strict=True)]
    table.add_row("total", "", "", f"{totals[0]:,}", f"{of_paper[0]:,}", "", f"{totals[1]}", f"{of_paper[1]}")
    console.print(table)
    console.print(
        f"Of {candidates:,} training candidates a task, repeated questions go; of {EVALUATION} for evaluation those "
        "shared with training. Table 3's counts are of seeds that the paper does not tell; others give others.",
        soft_wrap=True,
    )
    reasons = Counter[str]()
    for counts in found:
        reasons.update(counts.left_out)
    if reasons:
        listed = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        console.print(f"Left out, as another run would give another answer: {listed}", soft_wrap=True)
    faults = Faults()
    for counts in found:
        faults.extend(counts.faults)
    faults.show()
