"""Plots of bytes: sketches (C04), messages (C05), weights and moments at 7B (C11)."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from validation.figures.style import BLUE, GREEN, GREY, ORANGE, PURPLE, plot

MIB, GB, MB = 2**20, 1e9, 1e6


@plot(
    "C04", "Bytes of the gradient's accumulator in fp32, dense and as a sketch of rank 64; the paper's figures in grey."
)
def accumulators(data: dict[str, Any]) -> Figure:
    """Two matrices, two accumulators each, on a logarithmic axis."""
    figure = Figure(figsize=(6.4, 2.6))
    axes = figure.add_subplot()
    bars = [
        ("4096 × 4096, dense", data["square"]["dense"], ORANGE),
        ("4096 × 4096, sketch", data["square"]["sketch"], BLUE),
        ("512 × 4096, dense", data["wide"]["dense"], ORANGE),
        ("512 × 4096, sketch", data["wide"]["sketch"], BLUE),
    ]
    for place, (_, size, colour) in enumerate(bars):
        axes.barh(place, size / MIB, color=colour, height=0.6)
        axes.text(size / MIB * 1.15, place, f"{size / MIB:g} MiB", va="center")
    for place, paper in ((0, 64), (1, 1)):
        label = "the paper" if place == 0 else None
        axes.plot([paper, paper], [place - 0.45, place + 0.45], color=GREY, linestyle="--", linewidth=2.5, label=label)
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars])
    axes.invert_yaxis()
    axes.set_xscale("log", base=2)
    axes.set_xlim(2**-4, 2**9)
    axes.legend(loc="lower right")
    axes.set_xlabel("fp32 accumulator, MiB (logarithmic)")
    axes.grid(axis="y", visible=False)
    return figure


@plot("C05", "What one policy update costs to send at r = 256; percentages are of the selected weights in bf16.")
def messages(data: dict[str, Any]) -> Figure:
    """Four ways to send, for three models, on a logarithmic axis."""
    figure = Figure(figsize=(7.2, 3.6))
    axes = figure.add_subplot()
    ways = [
        ("all weights, bf16", ORANGE, ""),
        ("selected weights, bf16", PURPLE, "//"),
        ("factors, fp32", GREEN, ".."),
        ("factors, int8", BLUE, ""),
    ]
    for number, (way, colour, hatch) in enumerate(ways):
        for place, model in enumerate(data["models"]):
            x = place + (number - 1.5) * 0.2
            size = model[way] / MB
            bar = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
            axes.bar(x, size, 0.19, label=way if place == 0 else None, **bar)
            if way == "factors, int8":
                percent = 100 * model[way] / model["selected weights, bf16"]
                axes.text(x, size * 1.1, f"{percent:.1f} %", ha="center", fontsize=9)
    axes.set_xticks(range(len(data["models"])), [model["model"] for model in data["models"]])
    axes.set_yscale("log")
    axes.set_ylim(1e2, 1e5)
    axes.set_ylabel("bytes an update, MB (logarithmic)")
    axes.grid(axis="x", visible=False)
    figure.legend(loc="outside upper center", ncols=4, fontsize=9)
    return figure


@plot("C11", "7B: bf16 weights and Adam's two fp32 moments, counted; the paper's rounder figures dashed.")
def weights_and_moments(data: dict[str, Any]) -> Figure:
    """Two bars and the paper's two figures."""
    figure = Figure(figsize=(6.4, 2.5))
    axes = figure.add_subplot()
    _bar_with_paper(axes, 0, data["weights_gb"], 14, "7.62e9 parameters × 2 bytes")
    _bar_with_paper(axes, 1, data["moments_gb"], 56, "7.62e9 parameters × 8 bytes")
    axes.set_yticks([0, 1], ["weights, bf16", "Adam's moments, fp32"])
    axes.invert_yaxis()
    axes.set_xlim(0, 80)
    axes.set_xlabel("GB (10⁹ bytes)")
    axes.grid(axis="y", visible=False)
    figure.legend(loc="outside upper right")
    return figure


def _bar_with_paper(axes: Axes, place: int, size: float, paper: float, text: str) -> None:
    axes.barh(place, size, color=BLUE, height=0.5)
    axes.text(1, place, f"{size:.1f} GB = {text}" if size > 40 else "", va="center", color="white", fontsize=9)
    if size <= 40:
        axes.text(size + 1, place, f"{size:.1f} GB = {text}", va="center", fontsize=9)
    label = "the paper: 7e9 parameters" if place == 0 else None
    axes.plot([paper, paper], [place - 0.4, place + 0.4], color=GREY, linestyle="--", linewidth=2.5, label=label)


ITEMS = [
    ("weights", GREY, ""),
    ("gradients", ORANGE, "\\\\"),
    ("moments", PURPLE, "//"),
    ("sketches", BLUE, ""),
    ("factors", GREEN, "xx"),
    ("projections", PURPLE, ".."),
]
PAPER_GIB = {("1.5B", "dense"): 9.18, ("1.5B", "logra"): 7.18, ("7B", "dense"): 31.82}
PAPER_GIB |= {("7B", "logra"): 17.29, ("27B", "logra"): 51.54}


@plot(
    "C11", "Counted for each of 4 GPUs at r = 256, without activations; diamonds: what the paper measured, with them."
)
def memory(data: dict[str, Any]) -> Figure:
    """A panel a model, a stack a method, the paper's measured averages and a GPU's 80 GB marked."""
    figure = Figure(figsize=(8, 3.8))
    names: dict[str, Any] = {}
    for axes, (model, methods) in zip(figure.subplots(1, 3), data["memory_gib"].items(), strict=True):
        for place, (method, items) in enumerate(methods.items()):
            bottom = 0.0
            for item, colour, hatch in ITEMS:
                if item in items:
                    bar = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.6}
                    names[item] = axes.bar(place, items[item], 0.6, bottom=bottom, **bar)
                    bottom += items[item]
            axes.text(place, bottom, f"{sum(items.values()):.2f}", ha="center", va="bottom", fontsize=9)
            if (model, method) in PAPER_GIB:
                (names["the paper, measured"],) = axes.plot(
                    place, PAPER_GIB[model, method], "D", color="black", markerfacecolor="white", markersize=7
                )
        if model == "27B":
            names["a GPU of 80 GB"] = axes.axhline(80e9 / 2**30, color="black", linestyle="--", linewidth=1.2)
            axes.text(1, 90, "the paper, dense:\nout of memory", ha="center", va="center", fontsize=8)
        axes.set_xticks([0, 1], ["dense Adam", "LoGRA"])
        axes.set_title(model, fontsize=10)
        axes.set_xlim(-0.6, 1.6)
        axes.margins(y=0.12)
        axes.grid(axis="x", visible=False)
    figure.axes[0].set_ylabel("GiB a GPU")
    figure.legend(names.values(), names.keys(), loc="outside upper center", ncols=5, fontsize=8)
    return figure
