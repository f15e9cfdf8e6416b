"""Plots of C01, C02, C03 and C06: what a sketch knows of a gradient, and what it costs."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from validation.figures.style import BLUE, COLOURS, GREY, MARKERS, ORANGE, plot

HATCHES = ["", "//", "..", "xx", "\\\\"]


@plot("C01", "The mean of n reconstructions, each from its own A, nears G as 1/√n: no bias stays.")
def error_of_averages(data: dict[str, Any]) -> Figure:
    """Relative error of the average against its closed form, on two logarithmic axes."""
    averages = data["averages"]
    figure = Figure(figsize=(6.4, 3.8))
    axes = figure.subplots()
    axes.loglog(averages["averaged"], averages["predicted"], "--", color=GREY, label="√((k − 1)/(r n)), closed form")
    axes.loglog(averages["averaged"], averages["error"], "o", color=BLUE, label="measured, one run")
    axes.set_xlabel("number n of averaged reconstructions")
    axes.set_ylabel("‖mean of Ĝ − G‖ / ‖G‖")
    axes.legend()
    return figure


@plot("C01", "How much of Ĝ points along G, seed by seed: single draws spread widely, their means are 1.")
def alignment_histogram(data: dict[str, Any]) -> Figure:
    """The share of seeds by alignment, a step line for each kind of projection."""
    figure = Figure(figsize=(6.4, 3.8))
    axes = figure.subplots()
    edges = np.array(data["edges"])
    centres = (edges[:-1] + edges[1:]) / 2
    for (kind, counts), colour, marker in zip(data["alignment"].items(), COLOURS, MARKERS, strict=True):
        share = np.array(counts) / max(sum(counts), 1)
        mean = float((share * centres).sum())
        axes.plot(centres, share, color=colour, marker=marker, markersize=3, label=f"{kind}, mean {mean:.2f}")
    axes.axvline(1, color=GREY, linestyle="--", label="G itself")
    axes.set_xlabel("⟨Ĝ, G⟩ / ‖G‖² of one seed")
    axes.set_ylabel("share of seeds")
    axes.legend()
    return figure


@plot("C02", "With bf16 compute, sums in fp32 keep the accuracy of one rounding; sums in bf16 lose it as they grow.")
def error_by_microbatches(data: dict[str, Any]) -> Figure:
    """Relative error of the sketch against the number of microbatches."""
    figure = Figure(figsize=(6.4, 3.8))
    axes = figure.subplots()
    n = data["microbatches"]
    axes.loglog(n, data["bf16 sums"], "s-", color=ORANGE, label="S kept in bf16 (control)")
    axes.loglog(n, data["fp32 sums"], "o-", color=BLUE, label="S in fp32, as it is")
    axes.loglog(n, data["predicted"], "--", color=GREY, label="predicted: xAᵀ rounded once")
    axes.set_xlabel("microbatches added up")
    axes.set_ylabel("‖S − GAᵀ‖ / ‖GAᵀ‖")
    axes.legend()
    return figure


@plot("C03", "What one Transformer block (width 64, 64 tokens, r = 8, fp32) holds for training beside its weights.")
def bytes_by_part(data: dict[str, Any]) -> Figure:
    """A stacked bar for dense Adam and one for LoGRA, in KiB."""
    figure = Figure(figsize=(7.2, 3.2))
    axes = figure.subplots()
    block = data["block"]
    methods = list(block)
    parts = list(block[methods[0]])
    left = np.zeros(len(methods))
    for part, colour, hatch in zip(parts, [*COLOURS, GREY], HATCHES, strict=True):
        size = np.array([block[method][part] for method in methods]) / 1024
        axes.barh(methods, size, left=left, color=colour, hatch=hatch, edgecolor="white", label=part)
        left = left + size
    for method, total in zip(methods, left, strict=True):
        axes.text(total, method, f" {total:,.0f} KiB", va="center")
    axes.set_xlim(0, 1.15 * left.max())
    axes.invert_yaxis()
    axes.set_xlabel("memory beside the weights, KiB")
    axes.grid(axis="y", visible=False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


@plot(
    "C06",
    "With refresh the sum of updates grows out of rank r until it fills the matrix; with a fixed A it never does.",
)
def ranks(data: dict[str, Any]) -> Figure:
    """Exact rank by update, and the singular values of what the optimizer added to a weight."""
    figure = Figure(figsize=(8.4, 3.6))
    left, right = figure.subplots(1, 2)
    steps = range(1, len(data["refreshed"]) + 1)
    left.axhline(data["most"], color=GREY, linestyle=":", label="full rank, min(d, k)")
    left.plot(steps, data["expected"], "--", color=GREY, label="min(t·r, d, k)")
    left.plot(steps, data["refreshed"], "o", color=BLUE, label="A refreshed")
    left.plot(steps, data["fixed"], "s-", color=ORANGE, label="A fixed")
    left.set_xlabel("updates t")
    left.set_ylabel("rank of the sum of updates, exact")
    left.set_ylim(0, 1.05 * data["most"])
    left.legend(loc="center right")
    for (name, label), colour, marker in zip(
        [("every_update", "A refreshed"), ("fixed", "A fixed")], [BLUE, ORANGE], MARKERS, strict=False
    ):
        values = data["singular values"][name]
        right.semilogy(range(1, len(values) + 1), values, marker, color=colour, markersize=4, label=label)
    right.axhline(data["below"], color=GREY, linestyle="--", label="counted as zero below")
    right.set_xlabel("index of the singular value")
    right.set_ylabel(f"σ / σ₁ of W − W₀ after {data['trained']} updates")
    right.legend(loc="upper right", bbox_to_anchor=(1, 0.82))
    return figure
