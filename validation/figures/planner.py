"""Plots of the memory planner: Table 1 itemised (C15)."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from validation.figures.style import BLUE, GREEN, GREY, ORANGE, PURPLE, plot

ITEMS = [
    ("weights", GREY, ""),
    ("gradients", ORANGE, "\\\\"),
    ("moments", PURPLE, "//"),
    ("sketches", BLUE, ""),
    ("projections", PURPLE, ".."),
    ("directions", GREEN, "xx"),
    ("gathered layers", ORANGE, ""),
    ("activations", GREEN, ""),
    ("logits", BLUE, "//"),
    ("probe", GREY, "xx"),
]
PAPER = {"1.5B": {"dense": 9.18, "logra, as the paper": 7.18}, "7B": {"dense": 31.82, "logra, as the paper": 17.29}}
NAMES = {"dense": "dense", "logra, as the paper": "LoGRA,\ntheir way", "logra, ours": "LoGRA,\nours"}


@plot("C15", "The highest moment of an update on each of 4 GPUs, traced on shapes; diamonds: the paper's averages.")
def itemised(data: dict[str, Any]) -> Figure:
    """A panel a model, a stack a way to train; the paper's way without its probe."""
    figure = Figure(figsize=(8, 3.8))
    names: dict[str, Any] = {}
    for axes, (model, ways) in zip(figure.subplots(1, len(data), squeeze=False)[0], data.items(), strict=True):
        for place, (way, items) in enumerate(ways.items()):
            bottom = 0.0
            for item, colour, hatch in ITEMS:
                if items.get(item, 0) > 0:
                    bar = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.6}
                    names[item] = axes.bar(place, items[item], 0.6, bottom=bottom, **bar)
                    bottom += items[item]
            axes.text(place + 0.32, bottom, f"{sum(items.values()):.2f}", ha="left", va="center", fontsize=9)
            if way in PAPER[model]:
                (names["the paper, measured"],) = axes.plot(
                    place, PAPER[model][way], "D", color="black", markerfacecolor="white", markersize=7
                )
        axes.set_xticks(range(len(ways)), [NAMES[way] for way in ways])
        axes.set_title(model, fontsize=10)
        axes.set_xlim(-0.6, len(ways))
        axes.margins(y=0.12)
        axes.grid(axis="x", visible=False)
    figure.axes[0].set_ylabel("GiB a GPU")
    figure.legend(names.values(), names.keys(), loc="outside upper center", ncols=6, fontsize=8)
    return figure
