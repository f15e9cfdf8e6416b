"""How a plot of a page is drawn: SVG, its text in the reader's font, its ids clashing with no other's."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

Rows = Sequence[dict[str, Any]]

# Told apart also by the colour-blind: blue, Okabe and Ito's other colours, grey.
BLUE, ORANGE, GREEN, PINK, GREY = "#3056d3", "#d55e00", "#009e73", "#cc79a7", "#8790a3"
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "logra",  # the same log gives the same bytes
    "text.parse_math": False,
    "font.size": 10,
    "axes.edgecolor": "#c3c9d5",
    "axes.labelcolor": "#5a6478",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#eceef3",
    "xtick.color": "#5a6478",
    "ytick.color": "#5a6478",
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.labelcolor": "#30384a",
}
FEW = 60  # points that are drawn one by one
TINY, HUGE = 1e-100, 1e100  # far beyond what is measured; matplotlib's axes underflow and overflow not far beyond them


class Plot(NamedTuple):
    """A figure of the page."""

    title: str
    caption: str
    svg: str


def number(value: Any) -> float:
    """A value of a row; NaN where there is none. (A log has NaN and infinities as strings, which ``float`` takes.)"""
    return math.nan if value is None else float(value)


def drawn(value: float) -> float:
    """The value as an axis takes it: NaN, a gap, where it is infinite or huge, and 0 where it is tiny."""
    return math.nan if not abs(value) <= HUGE else value if abs(value) >= TINY else 0.0


@contextmanager
def drawing(
    done: list[Plot],
    at: Sequence[int],
    title: str,
    caption: str,
    *,
    logarithmic: bool = False,
    shares: bool = False,
    from_zero: bool = False,
    legend: bool = True,
) -> Iterator[Axes]:
    """Axes over the updates ``at`` to draw on; what was drawn is added to ``done``, the plots of a page so far."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.4, 2.7), layout="constrained")
        axes = figure.add_subplot(xlabel="update")
        if logarithmic:
            axes.set_yscale("log")
        yield axes
        axes.set_xlim(min(at) - 0.6, max(at) + 0.6)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        if logarithmic:
            _label_log_axis(axes)
        if from_zero and axes.dataLim.ymax > 0:
            axes.set_ylim(0, 1.1 * axes.dataLim.ymax)
        if shares:
            axes.set_ylim(-0.02, 1.02)  # marks at 0 are seen whole
            axes.yaxis.set_major_formatter(PercentFormatter(1, 0))
        if legend and len(axes.get_legend_handles_labels()[1]) > 1:
            figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=4)
        done.append(Plot(title, caption, svg_of(figure, title, len(done))))


def _label_log_axis(axes: Axes) -> None:
    """At 1, 2 and 5, of which a decade always has three, while there are few decades; matplotlib's own choice is the
    decades alone, or fractions of a number if there is none."""
    low, high = axes.get_ylim()
    if high / low < 10:
        middle = math.sqrt(low * high)
        axes.set_ylim(middle / math.sqrt(10), middle * math.sqrt(10))
    narrow = high / low < 500
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def svg_of(figure: Figure, title: str, index: int) -> str:
    """The figure as an element of a page; title and index together keep its ids apart from those of other plots."""
    buffer = io.StringIO()
    FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", svg)
    prefix = f"{re.sub('[^a-z]', '-', title.lower())}-{index}-"
    svg = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{prefix}", svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)
