"""The ledger as one self-contained page, plots inside."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any

import jinja2

import validation.figures
from validation.figures.style import PLOTS, image
from validation.text import figures, number, told_apart, without


def page(records: list[dict[str, Any]]) -> str:
    """HTML without a link to anything outside."""
    for module in pkgutil.iter_modules(validation.figures.__path__):
        importlib.import_module(f"validation.figures.{module.name}")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"figures": figures, "number": number, "told_apart": told_apart, "without": without}
    plots = {r["id"]: [_drawn(p, r["data"]) for p in PLOTS if p.claim == r["id"] and r["comparisons"]] for r in records}
    verdicts = ("holds", "differs", "fails", "not measured here")
    counts = {verdict: sum(r["verdict"] == verdict for r in records) for verdict in verdicts}
    return environment.get_template("page.html.jinja").render(records=records, plots=plots, counts=counts)


def _drawn(plot: Any, data: dict[str, Any]) -> tuple[str, str]:
    svg = image(plot.draw(data)).decode()
    return svg[svg.index("<svg") :], plot.caption
