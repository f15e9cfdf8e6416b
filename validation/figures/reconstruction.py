"""Plots of C13 and C27: Figure 5 from shapes and from real gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from validation.figures.style import BLUE, COLOURS, GREY, MARKERS, ORANGE, plot

SHORT = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o", "gate_proj": "gate", "up_proj": "up"}


@plot(
    "C13",
    "Cosine between G and its reconstruction, for each matrix of each layer of a pretrained model. Top: measured, mean "
    "over projection seeds. Middle: from the shapes alone. Bottom: with the second order, from the gradients' spectra.",
)
def heat_map(data: dict[str, Any]) -> Figure:
    """Layers by matrices at each rank: measured, first order, second order."""
    figure = Figure(figsize=(9.5, 8))
    if "real" not in data:
        figure.text(0.5, 0.5, "no pretrained model here: real gradients were not measured", ha="center")
        return figure
    real, ranks = data["real"], data["ranks"]
    measured, second = np.array(real["measured"]), np.array(real["second"])
    first = np.broadcast_to(np.array(real["first"])[:, None, :], measured.shape)
    axes = figure.subplots(3, len(ranks), sharex=True, sharey=True)
    names = [SHORT.get(matrix, matrix.removesuffix("_proj")) for matrix in real["matrices"]]
    ticks = range(0, len(real["layers"]), max(1, len(real["layers"]) // 6))
    for row, (label, values) in enumerate(
        {"measured": measured, "shapes alone": first, "second order": second}.items()
    ):
        for column, rank in enumerate(ranks):
            axis = axes[row, column]
            picture = axis.imshow(values[column], cmap="viridis", vmin=0, vmax=0.6, aspect="auto", origin="lower")
            axis.grid(False)
            axis.set_title(f"r = {rank}, mean {values[column].mean():.3f}", fontsize=9)
            axis.set_xticks(range(len(names)), names, rotation=45, fontsize=8)
            axis.set_yticks(list(ticks), [real["layers"][tick] for tick in ticks])
        axes[row, 0].set_ylabel(f"{label}\n\nTransformer layer")
    figure.colorbar(picture, ax=axes, label="cosine between G and G AᵀA", shrink=0.7)
    return figure


@plot(
    "C13",
    "What the gradient adds to the shape. Each point is a matrix at r = 4, its cosine over what the shape alone says; "
    "few effective ranks make it lower on average and spread it. Signs do not see the diagonal of M, so that the axis "
    "takes it off Σλ². Line and band: the second order, with two standard errors.",
)
def departures(data: dict[str, Any]) -> Figure:
    """Measured over first order at the smallest rank, against what takes the place of effective ranks for signs."""
    figure = Figure(figsize=(7, 4))
    axis = figure.subplots()
    axis.set_xlabel("1/(Σλ² − Σ M_ii²), for signs in place of the effective ranks 1/Σλ²")
    axis.set_ylabel("measured cosine / shapes alone, r = 4")
    if "real" not in data:
        return figure
    real, rank = data["real"], data["ranks"][0]
    ratio = np.array(real["measured"][0]) / np.array(real["first"][0])
    share = np.array(real["participation"]) - np.array(real["coherence"])
    for i, matrix in enumerate(real["matrices"]):
        axis.plot(
            1 / share[:, i],
            ratio[:, i],
            MARKERS[i % 4],
            color=COLOURS[i % 4],
            markerfacecolor="none" if i >= 4 else None,
            label=SHORT.get(matrix, "down"),
            markersize=5,
        )
    line = np.geomspace(share.min(), share.max(), 100)
    mean, spread = 1 - line / (4 * rank), 2 * np.sqrt(line / (2 * rank * real["seeds"]))
    axis.plot(1 / line, mean, color="black", label="2nd order")
    axis.fill_between(1 / line, mean - spread, mean + spread, color=GREY, alpha=0.2, linewidth=0)
    axis.axhline(1, color=GREY, linestyle="--", label="1st order")
    axis.set_xscale("log")
    ticks = [2**power for power in range(1 + int(np.log2(1 / share.min())))]
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.legend(ncols=5, fontsize=8)
    return figure


@plot(
    "C13",
    "Mean cosine of a layer against the rank. Lines: from the shapes of Qwen2.5-Math-1.5B and of the 135M model alone. "
    "Crosses: the paper's measurement on the former. Circles: measured here on gradients of the latter.",
)
def by_rank(data: dict[str, Any]) -> Figure:
    """The closed form beside the paper's figures and the means over real gradients."""
    figure = Figure(figsize=(6.5, 4))
    axis, ranks = figure.subplots(), data["ranks"]
    axis.plot(ranks, data["first"]["rademacher"], color=BLUE, label="1.5B, shapes alone")
    paper = {int(rank): value for rank, value in data["paper"].items()}
    axis.plot(list(paper), list(paper.values()), "x", color="black", markersize=9, label="1.5B, the paper's figures")
    if "real" in data:
        axis.plot(ranks, np.mean(data["real"]["first"], axis=1), "--", color=ORANGE, label="135M, shapes alone")
        means = np.mean(data["real"]["measured"], axis=(1, 2))
        axis.plot(ranks, means, "o", color=ORANGE, label="135M, real gradients")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(ranks, [str(rank) for rank in ranks])
    axis.set_yticks([0.05, 0.1, 0.2, 0.4], ["0.05", "0.1", "0.2", "0.4"])
    axis.minorticks_off()
    axis.set_xlabel("sketch rank r")
    axis.set_ylabel("mean cosine between G and G AᵀA")
    axis.legend()
    return figure


@plot(
    "C27",
    "Mean cosine of a Qwen2.5-Math-1.5B layer, from its shapes alone, by kind of projection. Right: what orthonormal "
    "rows gain over Rademacher ones, at the same memory.",
)
def kinds(data: dict[str, Any]) -> Figure:
    """The three kinds by rank, and the gain of orthonormal rows."""
    figure = Figure(figsize=(8.5, 3.6))
    left, right = figure.subplots(1, 2)
    ranks = data["ranks"]
    for kind, colour, marker in zip(data["means"], COLOURS, MARKERS, strict=False):
        style = "--" if kind == "gaussian" else "-"
        left.plot(ranks, data["means"][kind], style, color=colour, marker=marker, label=kind)
    left.set_xscale("log", base=4)
    left.set_xticks(ranks, [str(rank) for rank in ranks])
    left.minorticks_off()
    left.set_xlabel("sketch rank r")
    left.set_ylabel("mean cosine between G and G AᵀA")
    left.legend()
    gain = np.array(data["means"]["orthonormal"]) / np.array(data["means"]["rademacher"]) - 1
    right.bar([str(rank) for rank in ranks], 100 * gain, color=BLUE)
    right.set_xlabel("sketch rank r")
    right.set_ylabel("gain of orthonormal rows, %")
    return figure
