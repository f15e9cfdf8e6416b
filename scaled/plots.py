"""The plots of a run's report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import cycle
from statistics import median

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from scaled.figures import BLUE, FEW, GREEN, GREY, ORANGE, PINK, Plot, Rows, drawing, drawn, number

SMALL = FuncFormatter(lambda value, _: f"{value:.1e}" if value else "0")


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

    def plot(self, title: str, caption: str, **how: bool) -> AbstractContextManager[Axes]:
        return drawing(self.done, self.at, title, caption, **how)


def evaluation_plots(evaluations: Rows) -> list[Plot]:
    """Held-out accuracy by update, with its intervals."""
    plots = _Plots(evaluations)
    with plots.plot(
        "Right answers to held-out problems",
        "Problems that were never trained on. Greedy takes the likeliest token each time, sampled draws as in "
        "training. Bars are 95% intervals.",
        shares=True,
    ) as axes:
        kinds = dict.fromkeys(row["eval"] for row in evaluations)
        for name, colour in zip(kinds, cycle((BLUE, ORANGE, GREEN, PINK)), strict=False):
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
    if plots.has("response_tokens"):
        with plots.plot(
            "Length of the responses", "Mean over the batch, in tokens, without the prompt.", from_zero=True
        ) as axes:
            line(axes, column("response_tokens"), BLUE, "tokens")
        with plots.plot(
            "Responses cut by the limit of tokens",
            "Share of the sampled responses. What is cut rarely has an answer, and is then graded as wrong.",
            shares=True,
        ) as axes:
            line(axes, column("truncated"), BLUE, "cut")
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
            axes.yaxis.set_major_formatter(SMALL)
            line(axes, ratios, BLUE, "update")
    if plots.has("sketch_norm"):
        with plots.plot(
            "Norm of the sketches",
            "All sketches of an update together. The update takes its direction from them, its size not. Logarithmic.",
            logarithmic=True,
        ) as axes:
            line(axes, column("sketch_norm"), BLUE, "sketches")
    if plots.has("log_prob_difference"):
        with plots.plot(
            "Mismatch of engine and trainer",
            "In nats a token: the mean distance of their log-probabilities, their mean gap on completed responses, and "
            "the running average of that gap, which comes off the KL budget.",
        ) as axes:
            axes.yaxis.set_major_formatter(SMALL)
            line(axes, column("log_prob_difference"), GREY, "distance", "--")
            line(axes, column("mismatch_kl"), ORANGE, "gap", "o")
            line(axes, column("mismatch_smoothed"), BLUE, "smoothed")
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
    for phase, colour in {"rollout": BLUE, "train": ORANGE, "probe": GREEN, "update": PINK, "sync": GREY}.items():
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
