"""Plots of C12: what RowAdam does to rows, and what a refresh does to its second moment."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from validation.figures.style import BLUE, GREEN, GREY, ORANGE, plot


@plot(
    "C12", "Rows of very different gradients become alike, and the norm of the whole stays; ε damps the smallest rows."
)
def rows(data: dict[str, Any]) -> Figure:
    """Root mean square of each row of S and of U, by the size of the row's gradient."""
    figure = Figure(figsize=(6.4, 3.8))
    axes = figure.subplots()
    found = data["rows"]
    index = np.arange(1, len(found["S"]) + 1)
    axes.bar(index - 0.2, found["S"], 0.36, color=ORANGE, hatch="//", edgecolor="white", label="S")
    axes.bar(index + 0.2, found["U"], 0.36, color=BLUE, label="U")
    whole = np.sqrt(np.mean(np.square(found["S"])))
    axes.axhline(whole, color=GREY, linestyle="--", label="the whole of S, and of U")
    axes.set_yscale("log")
    axes.set_ylim(top=300 * whole)
    axes.set_xlabel("row, by the size of its gradient")
    axes.set_ylabel("root mean square of the row's numbers")
    axes.legend(ncols=3, loc="upper left")
    return figure


@plot("C12", "The second moment of one row, over its true value: with refresh it averages the luck of A out.")
def second_moments(data: dict[str, Any]) -> Figure:
    """The estimate over updates for five runs, A refreshed and A fixed, with the predicted spread."""
    figure = Figure(figsize=(6.8, 3.9))
    axes = figure.subplots()
    spread = np.array(data["deviation"])
    updates = np.arange(1, len(spread) + 1)
    axes.fill_between(updates, 1 - spread, 1 + spread, color=GREEN, alpha=0.25, label="1 ± predicted deviation")
    axes.axhline(1, color=GREY, linestyle="--", label="‖g‖²/r")
    for index, (course, fixed) in enumerate(zip(data["refreshed"], data["fixed"], strict=True)):
        axes.plot(updates, course, color=BLUE, label="A refreshed, five runs" if index == 0 else None)
        axes.axhline(fixed, color=ORANGE, linestyle=":", label="A fixed, five runs" if index == 0 else None)
    axes.set_xlabel("updates t")
    axes.set_ylabel("v / (1 − β₂ᵗ) over ‖g‖²/r")
    axes.set_ylim(bottom=0)
    axes.legend(ncols=2)
    return figure
