"""What all plots have in common, and how they are found by the claim they belong to."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure

Draw = Callable[[dict[str, Any]], Figure]

# Told apart in print and by eyes that do not see red or green; grey and a dashed line are the paper's figures.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072b2", "#d55e00", "#009e73", "#8a5aa5", "#7a8290"
COLOURS = [BLUE, ORANGE, GREEN, PURPLE]
MARKERS = ["o", "s", "^", "D"]
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "logra",  # the same figures give the same bytes
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e8ee",
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "figure.constrained_layout.use": True,
}


@dataclass(frozen=True)
class Plot:
    """A plot of a claim's data, with its caption."""

    claim: str
    caption: str
    draw: Draw


PLOTS: list[Plot] = []


def plot(claim: str, caption: str) -> Callable[[Draw], Draw]:
    """Register the decorated function as a plot of a claim's data; inside it, the common style holds."""

    def register(draw: Draw) -> Draw:
        def styled(data: dict[str, Any]) -> Figure:
            with matplotlib.rc_context(STYLE):
                figure = draw(data)
                figure.canvas.draw()
                return figure

        styled.__name__, styled.__doc__ = draw.__name__, draw.__doc__
        PLOTS.append(Plot(claim, caption, styled))
        return styled

    return register


def image(figure: Figure, kind: str = "svg") -> bytes:
    """A figure as the bytes of an SVG or PNG file, the same for the same figure."""
    file = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(file, format=kind, dpi=110, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return file.getvalue()
