"""Plots of engines that follow a trainer in bf16 (C26)."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from validation.figures.style import BLUE, GREEN, ORANGE, plot

ENGINES = [
    ("split", "bf16 and the low half: exact", BLUE, "o", "-"),
    ("stochastic", "bf16, rounded at random", GREEN, "s", "--"),
    ("nearest", "bf16, rounded to the nearest", ORANGE, "^", ":"),
]


@plot("C26", "Engines that are sent factors: how many bf16 entries are the trainer's, and how far they went along.")
def engines(data: dict[str, Any]) -> Figure:
    """Equal entries and share of the way, against updates."""
    figure = Figure(figsize=(7.6, 3.4))
    left, right = figure.subplots(1, 2)
    updates = [row["update"] for row in data["rows"]]
    for name, label, colour, marker, line in ENGINES:
        style = {"color": colour, "marker": marker, "linestyle": line, "markersize": 4}
        left.plot(updates, [100 * row[name]["equal"] for row in data["rows"]], label=label, **style)
        right.plot(updates, [100 * row[name]["share"] for row in data["rows"]], **style)
    for axes in (left, right):
        axes.set_ylim(0, 108)
        axes.set_xlabel("updates of relative size 6e-5")
    left.set_ylabel("bf16 entries equal to the trainer's, %")
    right.set_ylabel("share of the trainer's way, %")
    figure.legend(loc="outside upper center", ncols=3, fontsize=9)
    return figure
