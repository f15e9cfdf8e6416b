r"""Whether the final answer of a response is the gold answer: texts first, then math-verify.

LaTeX goes to latex2sympy by itself and not through ``math_verify.parse``, whose search in running text takes what
looks like a number out of what it cannot read, and evaluates plain expressions as Python. math-verify's time limits
are signals of the main thread, and are left off: the pool of workers has its own.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from scaled.graders.final_answer import LONGEST, final_answer
from scaled.graders.verdict import RIGHT, WRONG, Verdict, failed, unparseable

DECIMALS = 6  # a decimal answer to an exact gold one has to be right to so many places (math-verify's own default)


def grade(gold: str, text: str, cut: bool, metadata: dict[str, Any]) -> Verdict:
    """Right if the final answer equals the gold one; unparseable if there is none, or it is no mathematics.

    A gold answer that cannot be read is a failure of the grader, unless the answer is the same text.
    """
    found = final_answer(text, cut=cut)
    if found is None or not found.strip():
        return unparseable("no \\boxed{…} and no `Answer:` in the response")
    if len(found) > LONGEST:
        return unparseable(f"the answer has {len(found)} characters, more than {LONGEST}")
    return compare(gold, found)


def compare(gold: str, answer: str) -> Verdict:
    """The verdict on an answer without its response."""
    gold, answer = tidy(final_answer(gold) or gold), tidy(answer)
    if gold and _letters(gold) == _letters(answer):
        return RIGHT
    bases = BASED.fullmatch(gold), BASED.fullmatch(answer)
    if all(bases):  # math-verify leaves the base out
        return RIGHT if len({_value(*match.groups()) for match in bases}) == 1 else WRONG
    cased = _cased(gold + answer)
    expected = _parsed(gold, cased)
    if expected is None:
        return failed(f"the gold answer {gold!r:.80} cannot be read as mathematics")
    given = _parsed(answer, cased)
    if given is None:
        return unparseable(f"the answer {answer!r:.80} cannot be read as mathematics")
    return RIGHT if _same(expected, given) else WRONG


def prepare() -> None:
    """Import all that math-verify and sympy put off until they need it, before the first answer's time begins."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn that its time limits are off
    for gold, answer in (
        (r"\frac{1}{2}", "0.51"),
        ("(x+1)^2", "x^2+2x+1"),
        ("0<x<1", "(0,1)"),
        ("2x=y", "3x=y"),
        ("3", "x=4"),
    ):
        compare(gold, answer)


# What latex2sympy cannot read, or reads as something else, and what it is given instead.
SIGNS = str.maketrans(
    {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\leq "}
    | {"≥": r"\geq ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ", "°": r"^\circ ", "\u00a0": " "}
)
REPLACED = [
    (re.compile(r"\\(?:mathrm|text|textrm|mathit)\{([ei])\}"), r"\1"),  # the constants e and i, not units
    (re.compile(r"\\[lcv]?dots|…|\.\.\."), r"\\text{dots}"),  # a thing of its own, so that lists with gaps compare
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])"), r"\\pi "),  # not p times i
    (re.compile(r"(?<=\d)[eE]([+-]?\d{1,4})(?![\d.A-Za-z])"), r"\\times 10^{\1}"),  # not e, the constant
    (re.compile(r"(?<![\d./])(\d{1,6})\s+(?!\d{3}\b)(\d{1,6})/(\d{1,6})(?![\d.])"), r"\1\\frac{\2}{\3}"),  # 1 1/2
    (re.compile(r"√\s*\(([^()]*)\)|√\s*(\w+)"), r"\\sqrt{\1\2}"),
]
WRAPPED = re.compile(r"\$\$?(.*?)\$?\$|\\\((.*)\\\)|\\\[(.*)\\\]", re.DOTALL)
BASED = re.compile(r"([0-9A-Za-z]{1,60})_\{?(\d{1,2})\}?")
RELATIVE = 5e-6
SPACE = r"(?:\\[,;:! ]|\s|~)"
SPACES = re.compile(rf"(?<!\d){SPACE}+|{SPACE}+(?!\d)|{SPACE}+(?=\d{{3}}(?!\d))")  # between digits: of thousands alone
NAMES = re.compile(r"\\[A-Za-z]+")
WORDS = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s?\{[^{}]*\}|[A-Za-z]{3,}(?![A-Za-z{])")


def tidy(text: str) -> str:
    """The answer without Markdown's stars, the signs around mathematics, a full stop, and what no parser reads."""
    text = text.strip().strip("*").strip()
    if wrapped := WRAPPED.fullmatch(text.rstrip(".,; ")):
        text = next(part for part in wrapped.groups() if part is not None)
    text = text.strip().strip("*").rstrip(".,;: \n").translate(SIGNS)
    for pattern, replacement in REPLACED:
        text = pattern.sub(replacement, text)
    return text.strip()


def _same(expected: Any, given: Any) -> bool:
    import math_verify
    from sympy import Expr, UnevaluatedExpr

    # An inequality for an interval is right once it is solved; 2x + 1 < 7 for (-oo, 3) is the problem again.
    same = math_verify.verify(
        expected, given, float_rounding=DECIMALS, timeout_seconds=None, allow_set_relation_comp=_solved(given)
    )
    if not same or not (isinstance(expected, Expr) and isinstance(given, Expr)):
        return same
    # math-verify compares numbers to so many places, and so all tiny ones are equal.
    numbers = [value.doit() for value in (expected, given)]
    if any(value.is_finite is False for value in numbers):
        return True
    if any(value.free_symbols for value in numbers):
        return True
    if expected.has(UnevaluatedExpr) or given.has(UnevaluatedExpr):  # per cent: 28 % may stand for 28
        return True
    high = max(abs(value.evalf(30)) for value in numbers)
    return not abs((numbers[0] - numbers[1]).evalf(30)) > RELATIVE * high


def _solved(relation: Any) -> bool:
    """Whether each part of an inequality has its variable alone on one side, and none on the other."""
    from sympy import And
    from sympy.core.relational import Relational

    parts = relation.args if isinstance(relation, And) else [relation]
    return all(
        isinstance(part, Relational)
        and (part.lhs.is_Symbol or part.rhs.is_Symbol)
        and len(part.lhs.free_symbols) + len(part.rhs.free_symbols) == 1
        for part in parts
    )


def _value(digits: str, base: str) -> Any:
    """The number that digits mean in a base; what they are, if they mean none."""
    try:
        return int(digits, int(base))
    except ValueError:
        return digits, base


def _letters(text: str) -> str:
    """The text without what makes no difference: spaces, but `1 1/2` is not `11/2`; and the case of words."""
    squeezed = SPACES.sub("", text)
    return squeezed.lower() if re.search(r"[A-Za-z]{2}", NAMES.sub("", squeezed)) else squeezed


def _cased(text: str) -> bool:
    """Whether a letter stands there as a capital and as a small one, and so for two things."""
    letters = set(NAMES.sub("", WORDS.sub("", text)))
    return any(letter.isascii() and letter.isupper() and letter.lower() in letters for letter in letters)


def _parsed(text: str, cased: bool) -> Any:
    """The sympy object that a LaTeX text means, or None. math-verify takes capital letters for small ones."""
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy, normalize_latex
    from math_verify.parser import get_last_eq, parse_latex_cached, should_treat_as_complex

    def read(latex: str) -> Any:
        return latex2sympy(
            latex,
            is_real=not should_treat_as_complex(latex),
            convert_degrees=False,
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )

    config = NormalizationConfig(
        basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="none", equations=False
    )
    try:
        latex = normalize_latex(text, config)
        return read(get_last_eq(latex)) if cased else parse_latex_cached(latex)
    except MemoryError:
        raise
    except Exception:  # the parser raises Exception itself
        return None
