"""Plots of the learning runs: by rank (C14), by step-size setting (C24), long and beside other methods (C25)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from validation.figures.style import BLUE, COLOURS, GREY, MARKERS, ORANGE, plot

LINES = ["-", "--", "-.", ":"]


def draw_curves(axes: Axes, curves: dict[str, dict[str, Any]], names: Sequence[str]) -> None:
    """Mean accuracy of each curve with its band, against updates."""
    for (curve, name), colour, line, marker in zip(
        zip(curves.values(), names, strict=True), COLOURS, LINES, MARKERS, strict=False
    ):
        every = max(1, len(curve["update"]) // 6)
        axes.plot(
            curve["update"],
            np.multiply(100, curve["mean"]),
            line,
            color=colour,
            marker=marker,
            markevery=every,
            label=name,
        )
        low, high = np.multiply(100, curve["low"]), np.multiply(100, curve["high"])
        axes.fill_between(curve["update"], low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set(xlabel="update", ylabel="accuracy (%)", ylim=(0, 100))


@plot(
    "C14",
    "Accuracy on the toy task by rank: over updates (mean and 95 % interval over seeds, α at most 3), and at "
    "the end, a point a seed, with the cap on α and without. Grey: the rise that the paper found from rank 4 to 256, "
    "laid on the toy's mean at rank 4.",
)
def by_rank(data: dict[str, Any]) -> Figure:
    """Accuracy over updates, and at the end over rank."""
    figure = Figure(figsize=(9.5, 4))
    left, right = figure.subplots(1, 2)
    draw_curves(left, data["curves"], [f"r = {r}" for r in data["ranks"]])
    left.legend(loc="lower right")
    ranks = np.array(data["ranks"], dtype=float)
    kinds = (("ends", BLUE, "o", "-", "α ≤ 3", 0.96), ("free_ends", ORANGE, "s", "--", "α not capped", 1.04))
    for key, colour, marker, line, name, beside in kinds:
        ends = 100 * np.array(data[key])
        right.plot(np.repeat(ranks * beside, ends.shape[1]), ends.ravel(), marker, color=colour, alpha=0.45, ms=4)
        right.plot(ranks * beside, ends.mean(axis=1), line, color=colour, marker=marker, ms=8, label=name)
    start = 100 * float(np.mean(data["ends"][0]))
    share = np.log(ranks / ranks[0]) / np.log(ranks[-1] / ranks[0])
    low, high = (start + share * gain for gain in data["paper_gain"])
    right.fill_between(ranks, low, high, color=GREY, alpha=0.5, linewidth=0, label="the paper: +3.02 to +3.95")
    right.set_xscale("log", base=2)
    right.set_xticks(ranks, [str(r) for r in data["ranks"]])
    right.set(xlabel="rank r", ylabel="accuracy at the end (%)")
    right.legend(loc="lower right")
    return figure


@plot(
    "C24",
    "Figure 6's four step-size settings on the toy task: accuracy over updates (mean and 95 % interval over "
    "seeds); the KL that the updates realised; accuracy at the end, a point a seed, beside the paper's figures for its "
    "own model and task (grey dashes).",
)
def by_budget(data: dict[str, Any]) -> Figure:
    """Accuracy and realised KL over updates, and accuracy at the end, by step-size setting."""
    figure = Figure(figsize=(12.5, 4))
    left, middle, right = figure.subplots(1, 3)
    names = list(data["curves"])
    draw_curves(left, data["curves"], names)
    left.legend(loc="lower right")
    for name, colour, line in zip(names, COLOURS, LINES, strict=True):
        series = data["realised"][name]
        middle.plot(series["update"], series["value"], line, color=colour, label=name)
    middle.set_yscale("log")
    middle.set(xlabel="update", ylabel="realised KL of an update (nats)")
    for i, (name, colour, marker) in enumerate(zip(names, COLOURS, MARKERS, strict=True)):
        ends = 100 * np.array(data["ends"][name])
        right.plot(np.full(len(ends), i), ends, marker, color=colour, alpha=0.5, ms=5)
        right.plot([i - 0.2, i + 0.2], [ends.mean()] * 2, color=colour, linewidth=3)
        right.plot(
            [i - 0.35, i + 0.35],
            [data["paper"][name]] * 2,
            "--",
            color=GREY,
            linewidth=2,
            label="the paper" if i == 0 else None,
        )
    right.set_xticks(range(len(names)), names)
    right.set(ylabel="accuracy at the end (%)", ylim=(0, 100))
    right.legend(loc="lower left")
    return figure


@plot(
    "C25",
    "A long run on the toy task. Accuracy of LoGRA, dense Adam and LoRA, and of LoGRA with the budget rising to 100 "
    "times its start (mean and 95 % interval over seeds). Of LoGRA's first seed: reward of the batch, "
    "predicted and realised KL, multiplier α and coefficient q, averaged over blocks of updates.",
)
def long_run(data: dict[str, Any]) -> Figure:
    """Accuracy beside the other methods; reward, KL, α and q of the first seed."""
    figure = Figure(figsize=(10, 7))
    (accuracy, reward), (kl, control) = figure.subplots(2, 2)
    names = {"LoGRA": "LoGRA", "adam": "dense Adam", "lora": "LoRA"}
    curves = data["curves"] | {"wild": data["wild"]}
    draw_curves(accuracy, curves, [*(names[name] for name in data["curves"]), "LoGRA, budget rising"])
    accuracy.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    first = data["first"]
    reward.plot(first["reward"]["update"], first["reward"]["value"], color=BLUE)
    reward.set(xlabel="update", ylabel="mean reward of a batch", ylim=(0, 1))
    for key, colour, line in (("predicted", ORANGE, "--"), ("realised", BLUE, "-")):
        kl.plot(first[key]["update"], first[key]["value"], line, color=colour, label=f"{key} KL")
    kl.set_yscale("log")
    kl.set(xlabel="update", ylabel="KL of an update (nats)")
    kl.legend()
    for key, colour, line, name in (("alpha", BLUE, "-", "α (no unit)"), ("q", ORANGE, "--", "q (nats)")):
        control.plot(first[key]["update"], first[key]["value"], line, color=colour, label=name)
    control.set_yscale("log")
    control.set(xlabel="update", ylabel="multiplier α, coefficient q")
    control.legend()
    return figure
