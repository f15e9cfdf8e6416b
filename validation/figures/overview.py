"""The method as a picture: which matrices there are, and which of them LoGRA keeps."""

from __future__ import annotations

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from validation.figures.style import BLUE, GREEN, GREY, ORANGE, PURPLE, STYLE

D, K, R, N = 2.2, 3.0, 0.5, 1.5  # outputs, inputs, rank and tokens, in units of the picture


def method_picture() -> Figure:
    """Backward and update as products of rectangles: rows upwards, columns to the right, not to scale."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.2, 5.6))
        top, middle, bottom = figure.subplots(3, 1)
        _product(
            top,
            "dense: the gradient",
            [("δᵀ", D, N, "d × n", GREY), "·", ("x", N, K, "n × k", GREY), "=", ("G", D, K, "d × k", ORANGE)],
        )
        _product(
            middle,
            "LoGRA, backward: the sketch",
            [
                ("δᵀ", D, N, "d × n", GREY),
                "· (",
                ("x", N, K, "n × k", GREY),
                "·",
                ("Aᵀ", K, R, "k × r", PURPLE),
                ") =",
                ("S", D, R, "d × r", BLUE),
            ],
        )
        _product(
            bottom,
            "LoGRA, update: merged into W",
            [
                ("W", D, K, "d × k", GREEN),
                "←",
                ("W", D, K, "d × k", GREEN),
                "− α η",
                ("U", D, R, "d × r", BLUE),
                "·",
                ("A", R, K, "r × k", PURPLE),
            ],
        )
        figure.canvas.draw()
        return figure


def _product(axes: Axes, title: str, parts: list[str | tuple[str, float, float, str, str]]) -> None:
    left = 0.0
    for part in parts:
        if isinstance(part, str):
            width = 0.45 + 0.16 * len(part)
            axes.text(left + width / 2, 0, part, ha="center", va="center", fontsize=13)
        else:
            name, height, width, size, colour = part
            axes.add_patch(Rectangle((left, -height / 2), width, height, facecolor=colour, alpha=0.85))
            axes.text(left + width / 2, 0, name, ha="center", va="center", color="white", fontsize=13, weight="bold")
            axes.text(left + width / 2, -height / 2 - 0.1, size, ha="center", va="top", fontsize=8)
        left += width + 0.12
    axes.set_xlim(-0.1, 13.6)
    axes.set_ylim(-2.1, 1.6)
    axes.set_aspect("equal")
    axes.axis("off")
    axes.set_title(title, loc="left", fontsize=10)
