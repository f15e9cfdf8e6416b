"""Plots of C07 and C09: the KL along an update, the order of its remainder, and how the three probes agree."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from validation.figures.style import BLUE, GREEN, GREY, ORANGE, PURPLE, plot


def _guide(axes: Axes, x: list[float], y: float, power: int) -> None:
    """A dotted line of a given slope through (x[0], y)."""
    ends = np.array([x[0], x[-1]])
    axes.plot(ends, y * (ends / x[0]) ** power, color=GREY, linestyle=":", linewidth=1.2, zorder=1)
    axes.annotate(
        f"slope {power}", (x[0], y), color=GREY, ha="right", va="center", xytext=(-4, 0), textcoords="offset points"
    )


@plot("C07", "KL of a step α of a real proposal, its prediction α² q, and what is left between them.")
def quadratic_and_remainder(data: dict[str, Any]) -> Figure:
    """K(α) beside α² q, and the remainder with q right and 10 % off, over α."""
    figure = Figure(figsize=(7.2, 4.4))
    axes = figure.subplots()
    alpha = data["alpha"]
    axes.loglog(alpha, data["kl"], color=BLUE, marker="o", label="K(α), exact")
    axes.loglog(alpha, data["quadratic"], color=BLUE, linestyle="--", marker="x", label="α² q, predicted")
    axes.loglog(
        alpha, data["off"], color=PURPLE, marker="D", markersize=4, label="|K − 1.1 α² q|, a q that is 10 % off"
    )
    axes.loglog(alpha, data["remainder"], color=ORANGE, marker="s", label="|K − α² q|")
    _guide(axes, alpha, data["off"][0] / 3, 2)
    _guide(axes, alpha, data["remainder"][0] / 3, 3)
    axes.set_xlabel("step multiplier α, in units of the proposal")
    axes.set_ylabel("nats, mean over 64 positions")
    axes.set_xlim(alpha[0] / 4, alpha[-1] * 1.5)
    axes.legend()
    return figure


@plot("C09", "Left: the probes that take a step approach q as it shrinks. Right: q at each position of a real model.")
def probes(data: dict[str, Any]) -> Figure:
    """Deviation of finite difference and exact KL from q over the step (toy), and positions of the 135M model."""
    figure = Figure(figsize=(9.2, 4.2))
    left, right = figure.subplots(1, 2)
    toy = data["toy"]
    steps = toy["steps"]
    exact, finite = (np.array(toy[name]) / toy["q"] for name in ("exact", "finite_difference"))
    left.loglog(steps, exact, color=ORANGE, marker="s", label="exact KL at α, over α²")
    left.loglog(steps, finite, color=BLUE, marker="o", label="finite difference at ±α")
    _guide(left, steps, exact[0] / 2, 1)
    _guide(left, steps, finite[0] / 2, 2)
    left.set_xlabel("step multiplier α, in units of the proposal")
    left.set_ylabel("|value − q| / q, mean over positions")
    left.set_title("toy policy, fp64", loc="left", fontsize=10)
    left.set_xlim(steps[0] / 2, steps[-1] * 1.3)
    left.legend()
    right.set_title("SmolLM2-135M-Instruct, fp32", loc="left", fontsize=10)
    if "pretrained" in data:
        _positions(right, data["pretrained"])
    else:
        right.text(0.5, 0.5, "the pretrained model is not here", ha="center", transform=right.transAxes, color=GREY)
    return figure


def _positions(axes: Axes, found: dict[str, Any]) -> None:
    """The three probes at each position against a central difference of logits."""
    oracle = found["by_difference"]
    ends = [min(oracle) / 1.5, max(oracle) * 1.5]
    axes.loglog(ends, ends, color=GREY, linewidth=1, zorder=1)
    axes.loglog(oracle, found["by_exact"], "s", color=ORANGE, markersize=8, markerfacecolor="none", label="exact KL")
    axes.loglog(oracle, found["by_finite_difference"], "^", color=GREEN, markersize=6, label="finite difference")
    axes.loglog(oracle, found["positions"], "o", color=BLUE, markersize=3, label="JVP")
    axes.set_xlabel("q by central difference of logits, nats")
    axes.set_ylabel("q by each probe, nats")
    axes.legend()
