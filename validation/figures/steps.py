"""Plots of C10, C17, C18: budget and realised KL, the schedule, the mismatch; and which positions make up q."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from validation.figures.style import BLUE, COLOURS, GREEN, GREY, MARKERS, ORANGE, plot


@plot("C10", "Realised KL over the budget that α was chosen for, without the cap of 3; one line a proposal.")
def beyond_quadratic(data: dict[str, Any]) -> Figure:
    """Where the realised KL leaves the budget: toy proposals, and the 135M model where it was measured."""
    figure = Figure(figsize=(7.2, 4.4))
    axes = figure.subplots()
    axes.axvspan(2e-5, 2e-4, color=GREY, alpha=0.18, linewidth=0)
    axes.text(
        6.3e-5, 0.97, "the paper's\nbudgets", color=GREY, ha="center", va="top", transform=axes.get_xaxis_transform()
    )
    axes.axhline(1, color=GREY, linewidth=1)
    for number, sweep in enumerate(data["beyond"]):
        label = "toy policy, one line a proposal" if number == 0 else None
        budgets = [point["budget"] for point in sweep]
        ratios = [point["realised"] / point["budget"] for point in sweep]
        axes.semilogx(budgets, ratios, color=BLUE, marker="o", markersize=4, linewidth=1, label=label)
    if "pretrained" in data:
        budgets = [point["budget"] for point in data["pretrained"]]
        ratios = [point["realised"] / point["budget"] for point in data["pretrained"]]
        axes.semilogx(budgets, ratios, color=ORANGE, marker="s", linewidth=2, label="SmolLM2-135M-Instruct")
    axes.set_xlabel("budget, nats a position")
    axes.set_ylabel("realised KL / budget")
    axes.legend(loc="lower left")
    return figure


@plot("C09", "How unequal positions are: the share of q that the largest of them make up.")
def shares(data: dict[str, Any]) -> Figure:
    """q at each position of the 135M model, largest first, and the share of the whole that the first ones have."""
    figure = Figure(figsize=(7.2, 3.8))
    axes = figure.subplots()
    if "pretrained" not in data:
        axes.text(0.5, 0.5, "the pretrained model is not here", ha="center", transform=axes.transAxes, color=GREY)
        return figure
    values = np.sort(data["pretrained"]["positions"])[::-1]
    count = np.arange(1, len(values) + 1)
    axes.plot(count, 100 * np.cumsum(values) / values.sum(), color=ORANGE, marker="s", markersize=3, label="measured")
    axes.plot(count, 100 * count / len(values), color=GREY, linestyle="--", label="if all were equal")
    axes.set_xlabel("positions, those of the largest q first")
    axes.set_ylabel("share of q, %")
    axes.set_ylim(0, 105)
    axes.legend(loc="lower right")
    return figure


@plot("C17", "The KL budget over the updates of a run; dashed, the paper's two ends.")
def schedules(data: dict[str, Any]) -> Figure:
    """Budget over update for the three horizons."""
    figure = Figure(figsize=(7.2, 3.8))
    axes = figure.subplots()
    for end in (2e-4, 2e-5):
        axes.axhline(end, color=GREY, linestyle="--", linewidth=1)
    uses = {"300": "main runs", "1000": "27B, long run", "1500": "Figure 6"}
    for (horizon, points), colour, style in zip(data["schedules"].items(), COLOURS, ("-", "--", "-."), strict=False):
        u, budget = np.array(points).T
        axes.plot(u, budget, color=colour, linestyle=style, label=f"H = {horizon} ({uses[horizon]})")
    axes.set_xlabel("update u")
    axes.set_ylabel("budget $\\delta_u$, nats a position")
    axes.set_ylim(0, 2.2e-4)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    axes.legend()
    return figure


@plot("C18", "Mismatch as measured, smoothed (κ), and what it leaves of the budget; crosses: no valid measurement.")
def mismatch(data: dict[str, Any]) -> Figure:
    """Measurement and κ above, the effective budget below, over updates."""
    figure = Figure(figsize=(7.2, 5.0))
    above, below = figure.subplots(2, 1, sharex=True)
    scheduled, measured = data["scheduled"], data["measured"]
    updates = np.arange(1, len(measured) + 1)
    there = np.array([x is not None for x in measured])
    values = np.array([np.nan if x is None else x for x in measured])
    above.axhline(0, color=GREY, linewidth=1)
    above.plot(updates, values, "o", color=ORANGE, markersize=4, label="measured")
    above.plot(updates, data["kappa"], color=BLUE, label="κ")
    above.plot(updates[~there], np.zeros((~there).sum()), "x", color="black", markersize=6, label="no measurement")
    above.set_ylabel("log p engine − log p trainer,\nnats a token")
    above.legend(ncols=3, loc="upper left", bbox_to_anchor=(0.1, 1.25))
    below.axhline(scheduled, color=GREY, linestyle="--", linewidth=1)
    below.axhline(scheduled / 2, color=GREY, linestyle=":", linewidth=1)
    below.text(updates[-1], scheduled, "scheduled", color=GREY, ha="right", va="bottom")
    below.text(updates[-1], 0.47 * scheduled, "floor, half of it", color=GREY, ha="right", va="top")
    below.plot(updates, data["budget"], color=GREEN, marker=MARKERS[0], markersize=3, drawstyle="steps-mid")
    below.plot(updates[~there], np.array(data["budget"])[~there], "x", color="black", markersize=6)
    below.set_ylim(0, 1.25 * scheduled)
    below.set_ylabel("effective budget, nats")
    for axes in (above, below):
        axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    below.set_xlabel("update")
    return figure
