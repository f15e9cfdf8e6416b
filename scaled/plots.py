"""The plots of a report: SVG to stand in the page, its text in the reader's font, its ids clashing with no other's."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

Rows = Sequence[dict[str, Any]]

BLUE, ORANGE, GREEN, GREY, RED = "#3056d3", "#e07a1f", "#2b9a66", "#98a1b3", "#d1435b"
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


def kl_ratios(updates: Rows) -> list[float]:
    """Realised over predicted KL of each update, NaN where there is no such thing."""
    pairs = [(number(row.get("realised_kl")), number(row.get("predicted_kl"))) for row in updates]
    return [realised / predicted if predicted > 0 else math.nan for realised, predicted in pairs]


def median_ratio(updates: Rows) -> float | None:
    """The median of realised over predicted KL; None without any."""
    ratios = [ratio for ratio in kl_ratios(updates) if math.isfinite(ratio)]
    return median(ratios) if ratios else None


class _Plots:
    """The plots so far, and the columns of the rows that they show."""

    def __init__(self, rows: Rows) -> None:
        self.done: list[Plot] = []
        self.rows = rows
        self.at = [row["update"] for row in rows]

    def column(self, field: str, scale: float = 1.0) -> list[float]:
        return [drawn(scale * number(row.get(field))) for row in self.rows]

    def has(self, *fields: str) -> bool:
        """Whether each of the fields has a value above zero that a plot can show."""
        return all(any(value > 0 for value in self.column(field)) for field in fields)

    def line(self, axes: Axes, heights: Sequence[float], colour: str, label: str, style: str = "-") -> None:
        """A line, with a mark for each value if they are few; with style ``o`` the marks alone."""
        shown = [h if h > 0 or axes.get_yscale() != "log" else math.nan for h in map(drawn, heights)]
        few = len(shown) <= FEW
        marks = "o" if few and style == "-" else ""
        axes.plot(self.at, shown, style + marks, color=colour, label=label, markersize=4 if few else 1.5)

    @contextmanager
    def plot(
        self, title: str, caption: str, *, logarithmic: bool = False, shares: bool = False, from_zero: bool = False
    ) -> Iterator[Axes]:
        """Axes to draw on; what was drawn becomes a plot of the page."""
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=(5.4, 2.7), layout="constrained")
            axes = figure.add_subplot(xlabel="update")
            if logarithmic:
                axes.set_yscale("log")
            yield axes
            axes.set_xlim(min(self.at) - 0.6, max(self.at) + 0.6)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            if logarithmic:
                _label_log_axis(axes)
            if from_zero and axes.dataLim.ymax > 0:
                axes.set_ylim(0, 1.1 * axes.dataLim.ymax)
            if shares:
                axes.set_ylim(0, 1.02)
                axes.yaxis.set_major_formatter(PercentFormatter(1, 0))
            if len(axes.get_legend_handles_labels()[1]) > 1:
                figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=4)
            self.done.append(Plot(title, caption, _svg(figure, title, len(self.done))))


def evaluation_plots(evaluations: Rows) -> list[Plot]:
    """Held-out accuracy by update, with its intervals; the prefix keeps the ids apart from those of other plots."""
    plots = _Plots(evaluations)
    with plots.plot(
        "Right answers to held-out problems",
        "Problems that were never trained on. Greedy takes the likeliest token each time, sampled draws as in "
        "training. Bars are 95% intervals.",
        shares=True,
    ) as axes:
        for name, colour in zip(dict.fromkeys(row["eval"] for row in evaluations), (BLUE, ORANGE, GREEN), strict=False):
            rows = [row for row in evaluations if row["eval"] == name]
            at, right = [row["update"] for row in rows], [drawn(number(row["pass_at_1"])) for row in rows]
            low, high = zip(*(map(drawn, map(number, row["interval"])) for row in rows), strict=True)
            axes.vlines(at, low, high, color=colour, linewidth=5, alpha=0.25)
            axes.plot(at, right, "-o", color=colour, label=name, markersize=4)
    return plots.done


def update_plots(updates: Rows, alpha_max: float) -> list[Plot]:
    """A plot of each thing that the rows of the updates have values for."""
    plots = _Plots(updates)
    column, line = plots.column, plots.line
    with plots.plot(
        "Reward",
        "Mean reward of the batch that each update learnt from. A response is reinforced by as much as it beats the "
        "baseline, a running average of the rewards before it.",
    ) as axes:
        line(axes, column("baseline"), GREY, "baseline", "--")
        line(axes, column("reward"), BLUE, "reward")
    with plots.plot(
        "Right and well-formed answers in training",
        "Share of the sampled responses. The gap between the two lines is form without the right content.",
        shares=True,
    ) as axes:
        if plots.has("well_formed"):
            line(axes, column("well_formed"), ORANGE, "well-formed")
        line(axes, column("right"), BLUE, "right")
    if plots.has("realised_kl"):
        with plots.plot(
            "How far each update moved the policy",
            "KL divergence in nats a token: allowed (the budget), predicted before the update, and measured after it "
            "on the same contexts. Logarithmic.",
            logarithmic=True,
        ) as axes:
            if plots.has("budget", "predicted_kl"):
                line(axes, column("budget"), GREY, "budget", "--")
                line(axes, column("predicted_kl"), BLUE, "predicted")
            line(axes, column("realised_kl"), ORANGE, "realised", "o")
    if (middle := median_ratio(updates)) is not None and math.isfinite(drawn(middle)):
        with plots.plot(
            "Realised over predicted KL",
            "At 1 the prediction was exact. It is the leading, quadratic term of the KL: large steps depart from it.",
            from_zero=True,
        ) as axes:
            axes.axhspan(0.8, 1.25, color=GREEN, alpha=0.1, linewidth=0, label="0.8 to 1.25")
            axes.axhline(drawn(middle), color=ORANGE, label=f"median {middle:.2f}")
            line(axes, kl_ratios(updates), BLUE, "one update", "o")
    if plots.has("alpha"):
        with plots.plot(
            "Step multiplier α",
            "The proposed update is made α times as large, so that its predicted KL meets the budget.",
            from_zero=True,
        ) as axes:
            axes.axhline(alpha_max, color=GREY, linestyle="--", label=f"largest allowed, {alpha_max:g}")
            line(axes, column("alpha"), BLUE, "α")
    if plots.has("q"):
        with plots.plot(
            "Predicted KL of the proposal, q",
            "What the proposal would cost at α = 1, in nats a token, with its standard error over the probe's "
            "responses. Logarithmic.",
            logarithmic=True,
        ) as axes:
            errors = zip(plots.at, column("q"), column("q_se"), strict=True)
            bars = [(at, max(q - error, q / 10), q + error) for at, q, error in errors if q > 0 and error > 0]
            if bars:
                axes.vlines(*zip(*bars, strict=True), color=BLUE, linewidth=4, alpha=0.25)
            line(axes, column("q"), BLUE, "q")
    if plots.has("update_norm", "weight_norm"):
        ratios = [u / w if w else math.nan for u, w in zip(column("update_norm"), column("weight_norm"), strict=True)]
        with plots.plot(
            "Size of the update",
            "Norm of the update over the norm of the weights that are trained, α included.",
            from_zero=True,
        ) as axes:
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.1e}" if value else "0"))
            line(axes, ratios, BLUE, "update")
    if plots.has("sketch_norm"):
        with plots.plot(
            "Norm of the sketches",
            "All sketches of an update together. The update takes its direction from them, its size not. Logarithmic.",
            logarithmic=True,
        ) as axes:
            line(axes, column("sketch_norm"), BLUE, "sketches")
    if plots.has("seconds_rollout"):
        with plots.plot(
            "Seconds by phase",
            "Rollout samples and grades; train runs forward and backward; probe predicts the KL and measures it "
            "afterwards; update forms the step and adds it to the weights.",
        ) as axes:
            _stack(axes, plots)
    if plots.has("peak_bytes"):
        with plots.plot("Peak memory", "The most memory held so far, in GiB.", from_zero=True) as axes:
            line(axes, column("peak_bytes", 2**-30), BLUE, "peak")
    return plots.done


def _stack(axes: Axes, plots: _Plots) -> None:
    below = [0.0] * len(plots.at)
    for phase, colour in {"rollout": BLUE, "train": ORANGE, "probe": GREEN, "update": RED, "sync": GREY}.items():
        field = f"seconds_{phase}"
        if not plots.has(field):
            continue
        above = [low + (seconds if seconds > 0 else 0) for low, seconds in zip(below, plots.column(field), strict=True)]
        if len(above) > FEW:
            axes.fill_between(plots.at, below, above, step="mid", color=colour, label=phase, linewidth=0)
        else:
            heights = [high - low for high, low in zip(above, below, strict=True)]
            axes.bar(plots.at, heights, 0.8, below, color=colour, label=phase, linewidth=0)
        below = above


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


def _svg(figure: Figure, title: str, index: int) -> str:
    buffer = io.StringIO()
    FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", svg)
    prefix = f"{re.sub('[^a-z]', '-', title.lower())}-{index}-"
    svg = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{prefix}", svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
