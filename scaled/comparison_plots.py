"""The plots of several runs over each other; a run has the same colour, line and marks in each of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from scaled.figures import BLUE, GREEN, GREY, ORANGE, PINK, STYLE, Plot, Rows, drawing, drawn, number, svg_of
from scaled.logged import LoggedRun
from scaled.plots import SMALL, kl_ratios

# Okabe and Ito's colours, which the colour-blind tell apart, without the yellow that white swallows. The three lists
# have no common divisor: 7 · 4 · 5 runs until a look comes again.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#e69f00", "#56b4e9")
LINES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
MARKS = ("o", "s", "^", "D", "X")
PHASES = ("rollout", "train", "probe", "update", "sync")
MOST_POINTS = 120  # of a line; more, of several runs, hide each other
LONGEST_NAME = 24

Series = Callable[[Rows], list[float]]


def _field(name: str, scale: float = 1.0) -> Series:
    return lambda rows: [scale * number(row.get(name)) for row in rows]


def _update_size(rows: Rows) -> list[float]:
    norms = zip(_field("update_norm")(rows), _field("weight_norm")(rows), strict=True)
    return [update / weights if weights > 0 else math.nan for update, weights in norms]


LOGARITHMIC, SHARES, FROM_ZERO = ({name: True} for name in ("logarithmic", "shares", "from_zero"))
CURVES: list[tuple[str, str, Series, dict[str, bool]]] = [
    ("Reward", "Mean reward of the batch that each update learnt from.", _field("reward"), {}),
    ("Right answers in training", "Share of the sampled responses.", _field("right"), SHARES),
    ("Well-formed answers in training", "Share of the sampled responses.", _field("well_formed"), SHARES),
    (
        "Length of the responses",
        "Mean over the batch, in tokens, without the prompt.",
        _field("response_tokens"),
        FROM_ZERO,
    ),
    (
        "Responses cut by the limit of tokens",
        "Share of the sampled responses.",
        _field("truncated"),
        SHARES,
    ),
    (
        "Realised KL",
        "How far each update moved the policy, measured afterwards, in nats a token. Logarithmic.",
        _field("realised_kl"),
        LOGARITHMIC,
    ),
    (
        "Predicted KL",
        "What was predicted for the update before it was made, in nats a token. Logarithmic.",
        _field("predicted_kl"),
        LOGARITHMIC,
    ),
    ("Realised over predicted KL", "At 1 the prediction was exact.", kl_ratios, FROM_ZERO),
    ("KL budget", "Allowed for the update, in nats a token. Logarithmic.", _field("budget"), LOGARITHMIC),
    ("Step multiplier α", "The proposed update is made α times as large.", _field("alpha"), FROM_ZERO),
    (
        "Size of the update",
        "Norm of the update over the norm of the weights that are trained, α included.",
        _update_size,
        FROM_ZERO,
    ),
    (
        "Mismatch of engine and trainer",
        "Mean distance of their log-probabilities, in nats a token.",
        _field("log_prob_difference"),
        FROM_ZERO,
    ),
    ("Seconds an update", "From prompts to weights.", _field("seconds"), FROM_ZERO),
    ("Peak memory", "The most memory held so far, in GiB.", _field("peak_bytes", 2**-30), FROM_ZERO),
]
PRECISE = ("Size of the update", "Mismatch of engine and trainer")  # numbers too small for plain digits


def look(index: int) -> dict[str, Any]:
    """How the lines of a run are drawn, by its place among the runs."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": LINES[index % len(LINES)],
        "marker": MARKS[index % len(MARKS)],
        "markersize": 4.5,
    }


def swatch(index: int) -> str:
    """A piece of the run's line, for the page's legend."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(0.6, 0.2))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.plot([0, 1, 2], [0, 0, 0], **look(index))
        axes.set_xlim(-0.2, 2.2)
        return svg_of(figure, "line of a run", index)


def comparison_plots(runs: Mapping[str, LoggedRun]) -> list[Plot]:
    """A plot of each thing that any of the runs has values for, with the lines of those that have."""
    done = _evaluations(list(runs.values()))
    at = [row["update"] for run in runs.values() for row in run.updates]
    block = math.ceil(len(set(at)) / MOST_POINTS)
    smoothed = f" Each point is the median of {block} updates." if block > 1 else ""
    for title, caption, series, how in CURVES:
        lines = [_line(series, run.updates, block, positive=how is LOGARITHMIC) for run in runs.values()]
        if not any(height for _, heights in lines for height in heights):
            continue
        with drawing(done, at, title, caption + smoothed, legend=False, **how) as axes:
            if title in PRECISE:
                axes.yaxis.set_major_formatter(SMALL)
            for i, (where, heights) in enumerate(lines):
                if where:
                    # Some dozen marks, which tell a line from others where colours do not.
                    axes.plot(where, heights, **look(i), markevery=max(1, len(where) // 12))
    return done + _phases(runs, len(done))


def _line(series: Series, rows: Rows, block: int, *, positive: bool) -> tuple[list[float], list[float]]:
    """Updates and heights of a line: the medians of blocks of updates, without what an axis cannot show."""
    blocks: dict[int, list[tuple[int, float]]] = {}
    for row, height in zip(rows, map(drawn, series(rows)), strict=True):
        if math.isfinite(height) and (height > 0 or not positive):
            blocks.setdefault((row["update"] - 1) // block, []).append((row["update"], height))
    pairs = [[median(values) for values in zip(*pairs, strict=True)] for pairs in blocks.values()]
    return [where for where, _ in pairs], [height for _, height in pairs]


def _phases(runs: Mapping[str, LoggedRun], index: int) -> list[Plot]:
    """Where the seconds of an update go, a bar a run."""
    times = {
        phase: [
            median(_line(_field(f"seconds_{phase}"), run.updates, 1, positive=True)[1] or [0.0])
            for run in runs.values()
        ]
        for phase in PHASES
    }
    if not any(map(any, times.values())):
        return []
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.4, max(2.7, 1.1 + 0.28 * len(runs))), layout="constrained")
        axes = figure.add_subplot(xlabel="seconds")
        below = [0.0] * len(runs)
        for (phase, seconds), colour in zip(times.items(), (BLUE, ORANGE, GREEN, PINK, GREY), strict=True):
            if any(seconds):
                axes.barh(range(len(runs)), seconds, 0.6, below, color=colour, label=phase)
            below = [low + more for low, more in zip(below, seconds, strict=True)]
        names = ["".join(c if c.isprintable() else "?" for c in name) for name in runs]
        names = [name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}" for name in names]
        axes.set_yticks(range(len(runs)), names)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=5)
        caption = "Medians over each run's updates. Each is that of its own machine."
        return [Plot("Seconds by phase", caption, svg_of(figure, "Seconds by phase", index))]


def _evaluations(runs: Sequence[LoggedRun]) -> list[Plot]:
    """A plot for each kind of evaluation. Runs are set a little apart, or their intervals would cover each other."""
    done: list[Plot] = []
    at = [row["update"] for run in runs for row in run.evaluations]
    apart = (max(at, default=0) - min(at, default=0)) / 90
    for kind in dict.fromkeys(row["eval"] for run in runs for row in run.evaluations):
        title = f"Right answers to held-out problems, {kind}"
        caption = "Bars are 95% intervals over the problems; runs are set a little apart."
        with drawing(done, at, title, caption, legend=False, shares=True) as axes:
            for i, run in enumerate(runs):
                rows = [row for row in run.evaluations if row["eval"] == kind]
                where = [row["update"] + apart * (i - (len(runs) - 1) / 2) for row in rows]
                ends = [[drawn(number(end)) for end in row["interval"]] for row in rows]
                if rows:
                    axes.vlines(where, *zip(*ends, strict=True), color=look(i)["color"], linewidth=1.6, alpha=0.6)
                    axes.plot(where, [drawn(number(row["pass_at_1"])) for row in rows], **look(i))
    return done
