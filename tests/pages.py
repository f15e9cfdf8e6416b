"""Rows of made-up logs, and pages read back by the parsers of the standard library."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from scaled.metrics import EVALUATION_FIELDS, UPDATE_FIELDS


def update_row(update: int, batch: int | None = None, **changes: Any) -> dict[str, Any]:
    numbers = dict.fromkeys(UPDATE_FIELDS, 0.5)
    words = {"update": update, "batch": batch or update, "method": "logra", "skipped": None}
    return numbers | {"mismatch_kl": None, "sync_bytes": None, "peak_bytes": 3 * 2**30} | words | changes


def evaluation_row(update: int, name: str, right: float, **changes: Any) -> dict[str, Any]:
    numbers = dict.fromkeys(EVALUATION_FIELDS, 0.5) | {
        key: [0.25, 0.75] for key in EVALUATION_FIELDS if "interval" in key
    }
    words = {"update": update, "batch": update, "eval": name, "pass_at_1": right}
    of_tasks = {"unparseable": 0.0, "macro_score": None, "macro_score_interval": None, "by_source": None}
    return numbers | words | of_tasks | {"interval": [right - 0.06, right + 0.06]} | changes


def sample(update: int, name: str, kind: str = "eval-sampled", **changes: Any) -> dict[str, Any]:
    words = {"batch": update, "update": update, "kind": kind, "id": name, "prompt": f"user: problem {name}"}
    verdict = {"answer": "12", "reward": 1.0, "outcome": "right", "stop_reason": "stop", "tokens": 3}
    return words | verdict | {"text": f"answer at {update} to {name}"} | changes


class Page(HTMLParser):
    """A page's tags, its text, and its rows of table cells."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.html = path.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.rows, self._in_cell = "", [], False
        self.feed(self.html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._in_cell:
            self.rows[-1][-1] += data

    def plots(self) -> dict[str, ElementTree.Element]:
        svgs = map(ElementTree.fromstring, re.findall(r"<svg .*?</svg>", self.html, re.DOTALL))
        return {svg.get("aria-label"): svg for svg in svgs}


def labels(svg: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()) for text in svg.iter("{http://www.w3.org/2000/svg}text")]
