"""The final answer of a response to a mathematical problem: the last box, or the line that begins with `Answer:`."""

from __future__ import annotations

import re

# The prompt of DAPO asks for the answer in the last line, that of MATH for a box: an answer stands at the end. The
# longest of MATH-500 has 159 characters; verl looks at the last 300. So much of the end holds any answer with what is
# said after it, and keeps the time to search bounded whatever the response's length.
TAIL = 8_000
LONGEST = 1_000
# `Answer:`, `**Final Answer:**`, and what follows: displayed mathematics, or the rest of that line or the next one.
COLON = re.compile(
    r"\banswer\b[*_\s]{0,4}(?:\bis\b\s?)?[:：][*_\s]{0,12}(?=(\\\[.*?\\\]|\$\$.*?\$\$|[^\n]*))",
    re.IGNORECASE | re.DOTALL,
)
# `The final answer is`, and the rest of the line. Any talk about an answer has these words too.
SENTENCE_OF = re.compile(r"\banswer\b[*_\s]{0,4}\bis\b(?!\s?[:：])[*_ \t]{0,8}(?=([^\n]*))", re.IGNORECASE)
BOX = re.compile(r"\\(?:boxed|fbox)\s?\{")
# Boxes with no more than this between them are one answer of several parts: `\boxed{1}$ and $\boxed{2}`.
BETWEEN = re.compile(r"[\s$,;]*(?:and|or)?[\s$]*", re.IGNORECASE)
AFTERWORD = re.compile(r"\s*\.?\s*I hope it is correct\.?\s*$", re.IGNORECASE)
SENTENCE = re.compile(r"\.(?:\s|$)")
MARKED = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)")


def final_answer(text: str, *, cut: bool = False) -> str | None:
    r"""The text of the last answer, or None if there is none.

    It is what stands in the last ``\boxed{…}`` (in the last ones, joined by commas, if nothing but a comma or `and`
    is between them, and they differ) or after the last `Answer:`, whichever comes later; where neither is, after the
    last `answer is`. What a model thinks, up to ``</think>``, holds no answer; nor does a line that the limit of tokens
    has ``cut``.
    """
    thought, said = text.rfind("<think>"), text.rfind("</think>")
    if thought > said:
        return None
    text = text[max(said + len("</think>") if said >= 0 else 0, len(text) - TAIL) :]
    boxes = _boxes(text)
    line = _last(COLON, text, cut)
    if boxes and (line is None or boxes[-1][1] > line.start(1)):
        return _joined(text, boxes)
    said = None if line is None else AFTERWORD.sub("", line[1])
    sentence = _last(SENTENCE_OF, text if said is None else said, cut and said is None)
    if sentence is not None:  # others may follow it
        said = SENTENCE.split(sentence[1])[0]
    return None if said is None else _marked(said)


def _last(pattern: re.Pattern[str], text: str, cut: bool) -> re.Match[str] | None:
    found = [match for match in pattern.finditer(text) if match[1].strip()]
    if found and cut and found[-1].end(1) == len(text):
        return None
    return found[-1] if found else None


def _marked(answer: str) -> str:
    """The one formula of a line, where only words are beside it."""
    formulas = list(MARKED.finditer(answer))
    if len(formulas) != 1:
        return answer
    (one,) = formulas
    beside = answer[: one.start()] + answer[one.end() :]
    return answer if re.search(r"[\d\\$=<>]", beside) else one[1] or one[2]


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """Start, end and content of the boxes that are closed, in order; a box inside another is part of it."""
    found: list[tuple[int, int, str]] = []
    for match in BOX.finditer(text):
        if found and match.start() < found[-1][1]:
            continue
        end = _closing(text, match.end())
        if end is not None:
            found.append((match.start(), end, text[match.end() : end - 1]))
    return found


def _closing(text: str, start: int) -> int | None:
    depth, index = 1, start
    while index < len(text) and index - start <= LONGEST:
        character = text[index]
        if character == "\\":  # \{ and \} are signs, not brackets
            index += 2
            continue
        depth += {"{": 1, "}": -1}.get(character, 0)
        index += 1
        if depth == 0:
            return index
    return None


def _joined(text: str, boxes: list[tuple[int, int, str]]) -> str:
    parts = [boxes[-1]]
    for box in reversed(boxes[:-1]):
        if not BETWEEN.fullmatch(text[box[1] : parts[0][0]]):
            break
        parts.insert(0, box)
    return ",".join(dict.fromkeys(content.strip() for _, _, content in parts))
