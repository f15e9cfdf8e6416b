"""Hostile answers through the real graders: seconds, outcomes, replaced workers, and whether any had an effect.

The answers are made from a seed: fuzzed LaTeX, power towers, nesting, code, megabytes, odd characters. A canary file
stands for what an answer might do: its payloads try to make it.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from scaled.config import RunConfig
from scaled.records import Problem, Response
from scaled.rewards import Grader

KILLING_SECONDS = 10.0  # a process that ignores SIGTERM gets SIGKILL after 3; the rest is for a busy machine
GOLDS = ("34", r"\frac{1}{2}", "(-\\infty, 3)", "1,-2", "x^2+2x+1", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}")
PIECES = [
    r"\frac",
    r"\sqrt",
    r"\left(",
    r"\right)",
    r"{",
    r"}",
    r"^",
    r"_",
    r"&",
    r"\\",
    r"\int",
    r"\sum_{n=1}^{\infty}",
    r"\lim_{x\to0}",
    r"\log",
    r"\sin",
    r"\text{",
    r"\operatorname{f}",
    r"\begin{pmatrix}",
    r"\end{pmatrix}",
    r"\cup",
    r"=",
    r"<",
    r",",
    r"x",
    r"y",
    r"7",
    r"10^{9}",
    r"!",
    r"|",
    r"\%",
    r"\pm",
    r"\infty",
    r"[",
    r")",
    r"$",
    r"\boxed{",
]
CODE = (
    "__import__('pathlib').Path({canary!r}).touch()",
    "__import__('os').system('touch {canary}')",
    "open({canary!r}, 'w')",
    "exec(\"open({canary!r}, 'w')\")",
    'eval(\'__import__("os").system("touch {canary}")\')',
    "(lambda: open({canary!r}, 'w'))()",
    "().__class__.__base__.__subclasses__()",
    "$(touch {canary}) `touch {canary}` ; touch {canary}",
)
AROUND = (
    "{}",
    r"\text{{{}}}",
    r"\operatorname{{{}}}",
    r"f({}, 1)",
    r"\max({}, 2)",
    r"\{{{}, 1\}}",
    "[{}, 1)",
    "x_{{{}}}",
)
AROUND += (r"\begin{{pmatrix}} {} & 1 \end{{pmatrix}}", r"{} = 3", r"\gcd({}, 4)", r"3 < {} < 5", r"\frac{{{}}}{{2}}")


def tower(random: random.Random, _: str) -> str:
    """Powers of powers, and factorials."""
    digits = [str(random.randint(2, 99)) for _ in range(random.randint(3, 6))]
    return random.choice(["^{", "!^{"]).join(digits) + "}" * (len(digits) - 1) + random.choice(["", "!", "!!", " - 1"])


def nested(random: random.Random, _: str) -> str:
    """The same bracket or command inside itself, up to 3,000 deep."""
    depth = random.choice([20, 60, 100, 3000])
    start, end = random.choice(
        [("(", ")"), ("{", "}"), (r"\sqrt{", "}"), (r"\frac{1}{", "}"), ("2^{", "}"), ("[", "]"), ("-", "")]
    )
    return start * depth + "1" + end * depth


def fuzzed(random: random.Random, _: str) -> str:
    """Pieces of LaTeX in any order."""
    return " ".join(random.choice(PIECES) for _ in range(random.randint(1, 60)))


def code(random: random.Random, canary: str) -> str:
    """A payload that makes the canary, in every place where an answer may hold a text."""
    return random.choice(AROUND).format(random.choice(CODE).format(canary=canary))


def huge(random: random.Random, _: str) -> str:
    """Up to 14 million characters."""
    return random.choice(["9", "1+", "x^", "\\boxed{", "Answer: ", "answer is", "<answer>", "\n", "$"]) * random.choice(
        [300_000, 1_000_000]
    )


def odd(random: random.Random, _: str) -> str:
    """Controls, lone surrogates, marks that combine, digits of other scripts."""
    ranges = [
        (0, 32),
        (0xD800, 0xDFFF),
        (0x300, 0x36F),
        (0x202A, 0x202E),
        (0x660, 0x669),
        (0x1D400, 0x1D7FF),
        (0x2200, 0x22FF),
    ]
    return "".join(chr(random.randint(*random.choice(ranges))) for _ in range(random.randint(1, 200)))


def costly(random: random.Random, _: str) -> str:
    """Short, and long to compute."""
    n = random.randint(200, 9999)
    return random.choice(
        [
            rf"\sum_{{k=1}}^{{{n}}} k^{{{n}}}",
            rf"\int_0^1 x^{{{n}}} \sin^{{{n}}}(x) dx",
            rf"(x+y+z+w)^{{{n}}}",
            rf"\prod_{{k=1}}^{{{n}}} (x - k)",
            rf"{n}!!!",
            rf"\binom{{{n}000000}}{{{n}000}}",
            rf"10^{{{n}000000}}",
            rf"\sqrt[{n}]{{{n}!}}",
            rf"\lim_{{x \to 0}} x^{{x^{{{n}}}}}",
            rf"x^{{{n}}} + x + 1 = 0",
            "1e" + "9" * 9,
        ]
    )


KINDS: dict[str, Callable[[random.Random, str], str]] = {
    "power towers": tower, "deep nesting": nested, "fuzzed LaTeX": fuzzed, "code": code, "megabytes": huge,
    "odd characters": odd, "costly mathematics": costly,
}  # fmt: skip


@dataclass
class Found:
    """What the graders made of the answers; seconds of wall clock, ``slowest`` with the kind and its beginning."""

    answers: int
    seconds: float = 0.0
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    slowest: tuple[float, str, str] = (0.0, "", "")
    replaced: int = 0
    over: int = 0
    effects: list[str] = field(default_factory=list)

    @property
    def well(self) -> bool:
        """Whether every answer came back within the limit and none had an effect."""
        return not (self.over or self.effects)


def hostile_answers(count: int, seed: int, canary: str) -> list[tuple[str, Response]]:
    """Kind and response, the kinds in turn, every fourth to a task of reasoning-gym and the rest to mathematics."""
    source = random.Random(seed)
    made = []
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        answer = KINDS[kind](source, canary)
        if source.random() < 0.25:
            task = source.choice(["codeio", "pool_matrix", "word_ladder", "manipulate_matrix", "tsumego"])
            details = {"start_word": "COLD", "end_word": "WARM"}
            entry = {
                "question": "?",
                "answer": '{"a": [1, 2]}' if task == "codeio" else "1 2\n3 4",
                "metadata": details,
            }
            row = Problem(str(number), (), entry["answer"], task, "reasoning-gym", {"dataset": task, "entry": entry})
            text = f"<answer>{answer}</answer>"
        else:
            row = Problem(str(number), (), source.choice(GOLDS), "", "math")
            text = source.choice(["Answer: {}", "so \\boxed{{{}}}.", "<think>{}</think>\\boxed{{{}}}"]).replace(
                "{}", "\0"
            )
            text = text.replace("{{", "{").replace("}}", "}").replace("\0", answer)
        made.append((kind, Response(row, (1,), (2,), (0.0,), text, "stop")))
    return made


def try_hostile(count: int, seed: int, *, timeout: float) -> Found:
    """Grade hostile answers one at a time, so that each one's seconds are known, and held to the limit.

    One that takes longer than ``timeout`` and the time to end its process counts as over. The wait for a worker that
    replaces another is not its own: an easy answer goes before each, and its seconds are not counted.
    """
    found = Found(count)
    with tempfile.TemporaryDirectory() as folder:
        canary = Path(folder) / "canary"
        answers = hostile_answers(count, seed, str(canary))
        settings = {"reward": "verifier", "rewards": {"timeout": timeout}}
        config = RunConfig(run="none", updates=1, model={"path": "none"}, data={"task": "arithmetic"}, **settings)
        with Grader(config) as grader:
            grader.prepare([response.problem for _, response in answers])
            begun = time.perf_counter()
            for number, (kind, response) in enumerate(answers):
                easy = replace(response, problem=Problem("", (), "1", "", "math"), text=f"Answer: {number}")
                grader.grade([easy])
                before = time.perf_counter()
                (score,) = grader.grade([response])
                taken = time.perf_counter() - before
                found.over += taken > timeout + KILLING_SECONDS
                found.slowest = max(found.slowest, (taken, kind, response.text[:60]))
                found.outcomes.setdefault(kind, Counter())[score.outcome] += 1
            found.seconds = time.perf_counter() - begun
            found.replaced = grader.replaced
        found.effects = [path.name for path in Path(folder).iterdir()]
    return found


def bench_graders(console: Console, *, count: int, seed: int, timeout: float) -> bool:
    """Print what the graders made of hostile answers; False if one was over its time or had an effect."""
    found = try_hostile(count, seed, timeout=timeout)
    names = ("right", "wrong", "unparseable", "failed")
    table = Table("kind", *names, title=f"{count} hostile answers (seed {seed}), limit {timeout:g} s each")
    for kind, outcomes in found.outcomes.items():
        table.add_row(kind, *(str(outcomes[name]) for name in names))
    console.print(table)
    seconds, kind, text = found.slowest
    console.print(f"{found.seconds:.1f} s, {count / found.seconds:.1f} answers a second, one at a time")
    console.print(f"slowest: {seconds:.2f} s, {kind}: {text!r}", markup=False)
    console.print(
        f"workers replaced: {found.replaced}; over the limit: {found.over}; effects: {found.effects or 'none'}"
    )
    return found.well
