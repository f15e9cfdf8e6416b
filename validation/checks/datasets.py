"""The paper's data sets, C19 and C20: counts and overlaps of Reasoning-Gym Hard, rows of DAPO-Math-7.5K."""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from rich.console import Console

from scaled.datasets.hard_mixture import TABLE_3, Counts, entries, make
from scaled.datasets.mathematics import DAPO_COUNT, dapo_math
from validation.claim import Comparison, Measurement, NotMeasured, Setting, claim

SEED = 42  # the paper's for this mixture's run
NEIGHBOUR = SEED + 1
QUICK = ("emoji_mystery", "sentence_reordering")  # quick to draw, and with the most repetitions


def need(*packages: str) -> None:
    """Raises ``NotMeasured`` where one is not installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise NotMeasured(f"{', '.join(missing)} not installed: needs make data")


def questions(file: Path) -> Iterator[tuple[str, str]]:
    """Task and question of every row, read by JSON alone."""
    with file.open(encoding="utf-8", newline="\n") as lines:
        for line in lines:
            row = json.loads(line)
            yield row["source"], row["messages"][-1]["content"]


def farthest(counts: dict[str, int], place: int, *, relative: bool) -> float:
    """The largest difference from a column of Table 3 over the tasks, as a share of it in percent or as a count."""
    return max(
        abs(count - TABLE_3[task][place]) * (100 / TABLE_3[task][place] if relative else 1)
        for task, count in counts.items()
    )


def explained(found: list[Counts]) -> str:
    """Every count that is not Table 3's, and what it comes of."""
    parts = []
    for counts in found:
        paper = TABLE_3[counts.task]
        if (counts.train, counts.evaluation) == paper:
            continue
        left_out = sum(counts.left_out.values())
        parts.append(
            f"{counts.task} {counts.train:,} and {counts.evaluation} (Table 3: {paper[0]:,} and {paper[1]}), with "
            f"{counts.repeated} repeated, {counts.overlap} in both"
            + (f", {left_out} left out as their answers change from run to run" if left_out else "")
        )
    return "; ".join(parts)


@claim("C19", "Reasoning-Gym Hard: eight tasks, 38,948 and 193 problems", "Table 3")
def hard_mixture(setting: Setting) -> Measurement:
    """The mixture is made, and its files are counted; the control takes the evaluation's seed next to training's."""
    need("reasoning_gym")
    tasks = QUICK if setting.quick else tuple(TABLE_3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = make(folder, Console(stderr=True, quiet=not sys.stderr.isatty()), seed=SEED, tasks=tasks)
        train, evaluation = list(questions(folder / "train.jsonl")), list(questions(folder / "eval.jsonl"))
    counted = {task: sum(source == task for source, _ in train) for task in tasks}
    counted_evaluation = {task: sum(source == task for source, _ in evaluation) for task in tasks}
    unique = set(train)
    near = {
        ("emoji_mystery", entry["question"])
        for _, _, entry, _ in entries("emoji_mystery", {"eval": (NEIGHBOUR, 25)})
        if entry is not None
    }
    candidates = {counts.task: counts.train + counts.repeated + sum(counts.left_out.values()) for counts in found}
    comparisons = [
        Comparison(
            f"training problems, the largest difference from Table 3 over {len(tasks)} tasks",
            expected=0,
            measured=farthest(counted, 0, relative=True),
            tolerance=1,
            reason="another seed gives other repetitions: their number has a standard deviation of some 0.5 %",
            oracle="Table 3, and rows counted in the file",
            control="repeated questions kept",
            control_measured=farthest(candidates, 0, relative=True),
            unit="%",
        ),
        Comparison(
            "evaluation problems, the largest difference from Table 3 over the tasks",
            expected=0,
            measured=farthest(counted_evaluation, 1, relative=False),
            tolerance=4,
            reason="how many of 25 are in training is chance: of sentence_reordering 4 ± 2",
            oracle="Table 3, and rows counted in the file",
            control=f"evaluation drawn from seed {NEIGHBOUR}, training from {SEED}",
            control_measured=farthest({"emoji_mystery": len(near - unique)}, 1, relative=False),
        ),
        Comparison(
            "questions in both files",
            expected=0,
            measured=len(unique & set(evaluation)),
            tolerance=0,
            reason="a count",
            oracle="sets of the questions read back",
            control=f"evaluation drawn from seed {NEIGHBOUR}, training from {SEED} (emoji_mystery alone)",
            control_measured=len(unique & near),
        ),
        Comparison(
            "questions that are in the training file again",
            expected=0,
            measured=len(train) - len(unique),
            tolerance=0,
            reason="a count",
            oracle="sets of the questions read back",
            control="repeated questions kept",
            control_measured=sum(candidates.values()) - len(unique),
        ),
    ]
    rest = [task for task in TABLE_3 if task not in tasks]
    return Measurement(
        comparisons,
        note=f"{len(train):,} and {len(evaluation)} problems of {len(tasks)} tasks. Not as in Table 3, whose seeds are "
        f"not known: {explained(found)}.",
        data={task: [counted[task], counted_evaluation[task], *TABLE_3[task]] for task in tasks},
        not_measured=[f"{', '.join(rest)} (--quick)"] if rest else [],
    )


def published(unique: int, generator: random.Random) -> list[dict]:
    """Rows of DAPO-Math-17k's schema, each prompt one to four times; some differ in what is no key alone."""
    rows = []
    for number in range(unique):
        for _ in range(generator.randint(1, 4)):
            prompt = [{"content": f"Solve problem {number}.", "role": "user"}]
            if generator.random() < 0.2:
                prompt.append({"content": f"Think {generator.randint(1, 3)} times.", "role": "user"})
            judged_by = {"ground_truth": str(len(rows)), "style": "rule-lighteval/MATH_v2"}
            rows.append({"data_source": "math_dapo", "prompt": prompt, "ability": "MATH", "reward_model": judged_by})
    generator.shuffle(rows)
    return rows


@claim("C20", "DAPO-Math-7.5K: the first 7,500 unique prompts in source order", "C.1")
def first_unique(setting: Setting) -> Measurement:
    """A parquet file of the schema, with repeated prompts in any order; every row's answer tells which row it was."""
    need("pyarrow")
    import pyarrow
    import pyarrow.parquet

    rows = published(9000, random.Random(setting.derived_seed("C20")))
    keys = [row["prompt"][0]["content"] for row in rows]
    answers = [row["reward_model"]["ground_truth"] for row in rows]
    first = first_of_each(keys)[:DAPO_COUNT]
    last_of_each = dict(zip(keys, answers, strict=True))  # keeps the last value, at the first one's place
    with tempfile.TemporaryDirectory() as name:
        source, out = Path(name, "source.parquet"), Path(name, "out.jsonl")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source, row_group_size=1000)
        dapo_math(out, str(source), Console(quiet=True))
        found = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    wanted = [answers[index] for index in first]
    got = [row["answer"] for row in found]
    of_whole = first_of_each([json.dumps(row["prompt"]) for row in rows])[:DAPO_COUNT]
    return Measurement(
        [
            Comparison(
                f"rows of {DAPO_COUNT:,} that are not the first of their prompt, in the order of the source",
                expected=0,
                measured=differences(got, wanted),
                tolerance=0,
                reason="a count",
                oracle=f"of {len(rows):,} rows the first of each prompt, by sorting all of them",
                control="duplicates told by the whole prompt, not by its first message",
                control_measured=differences([answers[index] for index in of_whole], wanted),
            ),
            Comparison(
                "the same, and of equal prompts the first",
                expected=0,
                measured=differences(got, wanted),
                tolerance=0,
                reason="a count",
                oracle="as above",
                control="of equal prompts the last",
                control_measured=differences(list(last_of_each.values())[:DAPO_COUNT], wanted),
            ),
            Comparison(
                "the same prompts in another order",
                expected=0,
                measured=differences([row["messages"][0]["content"] for row in found], [keys[i] for i in first]),
                tolerance=0,
                reason="a count",
                oracle="as above",
                control="unique prompts sorted",
                control_measured=differences(sorted(set(keys))[:DAPO_COUNT], [keys[i] for i in first]),
            ),
        ],
        note="The published file itself is not here; its schema and its repeated prompts are.",
    )


def first_of_each(keys: list[str]) -> list[int]:
    """The places of the first of equal keys, in order, by sorting."""
    return sorted(np.unique(np.array(keys), return_index=True)[1].tolist())


def differences(one: list[str], other: list[str]) -> int:
    """Places where two lists differ."""
    return sum(a != b for a, b in zip(one, other, strict=False)) + abs(len(one) - len(other))
