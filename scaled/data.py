"""Problems: read from jsonl, split into train and held out, and dealt out in shuffled epochs."""

from __future__ import annotations

import codecs
import json
import math
import random
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from scaled.config_data import DataConfig
from scaled.errors import UserError
from scaled.records import VERIFIERS, Message, Problem
from scaled.seeds import derive_seed
from scaled.tasks import arithmetic, arithmetic_group

ROLES = ("system", "user", "assistant")
ROWS_SHOWN = 20


class RowError(Exception):
    """What is wrong with one row, and the remedy."""


def load_problems(path: Path) -> list[Problem]:
    """The problems of a jsonl file: UTF-8, one object a line, blank lines skipped.

    A row has ``messages`` (a list of {role, content}), ``answer`` (a string or a number), and, if wanted, ``id``
    (by default file:line), ``source``, ``verifier`` and ``metadata`` (an object); other keys are ignored. Raises a
    ``UserError`` that lists the first 20 bad rows with file and line.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is no ordinary file, and a run that is resumed reads it again; give a jsonl file")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give the path of a readable jsonl file") from error
    problems: list[Problem] = []
    line_of_id: dict[str, int] = {}
    bad: list[str] = []
    # Only "\n" ends a row: str.splitlines would also cut at U+2028, which JSON allows inside a string.
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            problem = read_row(parse_row(line), default_id=f"{path}:{number}")
            if problem.id in line_of_id:
                raise RowError(
                    f"`id` {problem.id!r} is that of line {line_of_id[problem.id]} too; give each row its own"
                )
        except RowError as error:
            bad.append(f"{path}:{number}: {error}")
        else:
            problems.append(problem)
            line_of_id[problem.id] = number
    if bad:
        more = [f"… and {len(bad) - ROWS_SHOWN} more"] if len(bad) > ROWS_SHOWN else []
        raise UserError("\n".join([f"{path}: rows that cannot be used: {len(bad)}", *bad[:ROWS_SHOWN], *more]))
    if not problems:
        raise UserError(f"{path}: has no rows; write one JSON object with `messages` and `answer` on each line")
    return problems


def parse_row(line: bytes) -> Any:
    """The JSON of a line. Raises ``RowError``."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RowError(f"byte {error.start + 1} is not UTF-8; save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise RowError(f"not valid JSON ({error}); write one JSON object on each line") from error


def read_row(row: Any, default_id: str) -> Problem:
    """The problem that a row says, of the keys that ``load_problems`` names. Raises ``RowError``."""
    if not isinstance(row, dict):
        raise RowError(f'the row is {shown(row)}, not an object; write {{"messages": […], "answer": …}}')
    messages = _read_messages(row)
    if row.get("answer") is None:
        raise RowError("`answer` is missing; add the right answer as a string")
    answer = row["answer"]
    whole = isinstance(answer, int) and not isinstance(answer, bool)
    if whole or (isinstance(answer, float) and math.isfinite(answer)):
        answer = str(answer)
    if not isinstance(answer, str) or not answer.strip():
        raise RowError(f"`answer` is {shown(answer)}; give a string that is not blank, or a finite number")
    row_id, source, verifier = row.get("id", default_id), row.get("source", ""), row.get("verifier", "")
    metadata = row.get("metadata", {})
    if isinstance(row_id, int) and not isinstance(row_id, bool):
        row_id = str(row_id)
    for name, value in (("id", row_id), ("source", source)):
        if not isinstance(value, str):
            raise RowError(f"`{name}` is {shown(value)}; give a string or leave it out")
    if verifier not in ("", *VERIFIERS):
        raise RowError(f"`verifier` is {shown(verifier)}; use one of {', '.join(VERIFIERS)} or leave it out")
    if not isinstance(metadata, dict):
        raise RowError(f"`metadata` is {shown(metadata)}; give an object or leave it out")
    # JSON can spell half of a surrogate pair, which no tokenizer and no file takes later on.
    nested = json.dumps(metadata, ensure_ascii=False)
    for text in (answer, row_id, source, nested, *(message["content"] for message in messages)):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            half = text[error.start].encode("ascii", "backslashreplace").decode()
            raise RowError(f"{half} is half of a surrogate pair; write the whole character") from error
    return Problem(row_id, messages, answer, source, verifier, metadata)


def _read_messages(row: dict[str, Any]) -> tuple[Message, ...]:
    remedy = 'write [{"role": "user", "content": "…"}]'
    if row.get("messages") is None:
        raise RowError(f"`messages` is missing; {remedy}")
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise RowError(f"`messages` is {shown(messages)}, not a list with at least one message; {remedy}")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise RowError(f"message {number} is {shown(message)}, not an object; {remedy}")
        if message.get("role") not in ROLES:
            raise RowError(f"message {number}: `role` is {shown(message.get('role'))}; use one of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise RowError(f"message {number}: `content` is {shown(message.get('content'))}; give a string")
    if messages[-1]["role"] == "system":
        raise RowError("the last message is the system's; end with a user's, or with the start of the assistant's")
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)


def load_data(config: DataConfig, seed: int) -> tuple[list[Problem], list[Problem]]:
    """The problems to train on and those held out.

    Without a ``held_out_file`` exactly ``held_out`` problems are split off; which ones follows from the seed and the
    order of the data alone. Problems with equal messages, and commuted pairs of ``arithmetic``, stay on one side.
    Raises a ``UserError`` if that leaves nothing to train on, cannot be done exactly, or if the files overlap.
    """
    if config.file is not None:
        name, group = str(config.file), _messages_key
        problems = load_problems(config.file)
    else:
        name, group = "arithmetic", arithmetic_group
        problems = arithmetic()
    if config.held_out_file is None:
        return _split(problems, group, config.held_out, seed, name)
    held_out = load_problems(config.held_out_file)
    trained = {_messages_key(problem): problem for problem in reversed(problems)}
    overlap = [(problem, trained[key]) for problem in held_out if (key := _messages_key(problem)) in trained]
    if overlap:
        raise UserError(
            f"{config.held_out_file}: {len(overlap)} of {len(held_out)} rows are in the training data {name} too, the "
            f"first is {overlap[0][0].id!r} (there {overlap[0][1].id!r}); remove them from one of the two"
        )
    return problems, held_out


def _messages_key(problem: Problem) -> Hashable:
    return tuple((message["role"], message["content"]) for message in problem.messages)


def _split(
    problems: list[Problem], group: Callable[[Problem], Hashable], count: int, seed: int, name: str
) -> tuple[list[Problem], list[Problem]]:
    if count >= len(problems):
        raise UserError(
            f"data.held_out={count} leaves nothing to train on: {name} has {len(problems)} problems; "
            f"set data.held_out to less, or give a data.held_out_file"
        )
    members: dict[Hashable, list[int]] = {}
    for index, problem in enumerate(problems):
        members.setdefault(group(problem), []).append(index)
    groups = list(members.values())
    groups = [groups[index] for index in _permutation(len(groups), derive_seed(seed, "data/split"))]
    # Bit s of reachable[i] says that some of the groups from i on have s problems together. So a group is taken only
    # if those after it can fill the rest, and the count is met exactly whenever it can be.
    reachable = [1]
    for indices in reversed(groups):
        reachable.append((reachable[-1] | reachable[-1] << len(indices)) & ((2 << count) - 1))
    reachable.reverse()
    if not reachable[0] >> count & 1:
        raise UserError(
            f"data.held_out={count} cannot be met: rows of {name} with equal messages stay on one side; "
            f"set data.held_out={reachable[0].bit_length() - 1}"
        )
    chosen: set[int] = set()
    for indices, later in zip(groups, reachable[1:], strict=True):
        rest = count - len(chosen) - len(indices)
        if rest >= 0 and later >> rest & 1:
            chosen.update(indices)
    train = [problem for index, problem in enumerate(problems) if index not in chosen]
    return train, [problem for index, problem in enumerate(problems) if index in chosen]


def _permutation(count: int, seed: int) -> list[int]:
    # Sorting by random() and not shuffle(): only the former is promised to be the same in every version of Python.
    generator = random.Random(seed)
    return sorted(range(count), key=lambda _: generator.random())


class ProblemStream:
    """Shuffled epochs without end. Its whole state is a position, the number of problems taken so far."""

    def __init__(self, problems: Sequence[Problem], seed: int) -> None:
        """Raises a ``UserError`` if there are no problems."""
        if not problems:
            raise UserError("there are no problems to train on; give data with at least one")
        self.problems = tuple(problems)
        self._order = lru_cache(maxsize=2)(
            lambda epoch: _permutation(len(self.problems), derive_seed(seed, "data/epoch", epoch))
        )

    def take(self, position: int, count: int) -> list[Problem]:
        """The ``count`` problems from ``position`` on; they may span epochs. The next position is position + count."""
        places = (divmod(index, len(self.problems)) for index in range(position, position + count))
        return [self.problems[self._order(epoch)[offset]] for epoch, offset in places]
