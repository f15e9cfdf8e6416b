"""How a step's seconds and memory grow: with tokens, with the rank, with the width of a model.

Measured by ``bench step`` on one decoder layer of shipped architectures, where nothing but the layer counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import correlation, linear_regression
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from scaled.bench import step
from scaled.figures import BLUE, GREEN, GREY, ORANGE, STYLE
from scaled.memory.architecture import architecture

MIB = 2**20
TOKENS = (64, 128, 256, 512)  # of each of two sequences
RANKS = (32, 64, 128, 256)
MODELS = ("qwen2.5-math-1.5b", "qwen2.5-math-7b", "27b-stand-in")
LOOKS = {"frozen": (GREY, ":"), "dense": (ORANGE, "--"), "logra": (BLUE, "-"), "lora": (GREEN, "-.")}


def compare(
    *,
    tokens: Sequence[int] = TOKENS,
    ranks: Sequence[int] = RANKS,
    models: Sequence[str] = MODELS,
    repeats: int,
) -> dict[str, Any]:
    """``bench step``'s figures by tokens, by rank and by model, and ``slopes``. The first model has the first two."""
    chosen = {"repeats": repeats, "checkpointing": False, "peers": Path()}
    middle = ranks[len(ranks) // 2]
    methods = ["frozen", "dense", f"logra:{middle}", f"lora:{middle}"]
    every = [*methods[:2], *(f"{method}:{rank}" for method in ("logra", "lora") for rank in ranks)]
    found = {
        "tokens": {n: step.compare(methods, models[0], tokens=n, **chosen) for n in tokens},
        "rank": step.compare(every, models[0], tokens=tokens[-1], **chosen),
        "width": {
            architecture(model).hidden_size: step.compare(methods, model, tokens=tokens[len(tokens) // 2], **chosen)
            for model in models
        },
        "models": list(models),
        "ranks": list(ranks),
    }
    return found | {"slopes": slopes(found)}


def fit(x: Sequence[float], y: Sequence[float]) -> dict[str, float]:
    """The straight line through points, how much of y's variance it explains, and p of y ~ x^p over the last step."""
    slope, intercept = linear_regression(x, y)
    exponent = math.log(y[-1] / y[-2]) / math.log(x[-1] / x[-2])
    explained = correlation(x, y) ** 2 if max(y) > min(y) else 1.0
    return {"slope": slope, "intercept": intercept, "explained": explained, "exponent": exponent}


def slopes(found: Mapping[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """By method: seconds and memory beyond the weights in tokens; by rank, what a step has above ``frozen``."""
    in_tokens = {}
    by_tokens = found["tokens"]
    batches = [each["tokens"] for each in by_tokens.values()]
    for method in next(iter(by_tokens.values()))["seconds"]:
        in_tokens[f"{method}, ms a token"] = fit(
            batches, [1e3 * each["seconds"][method] for each in by_tokens.values()]
        )
        above = [(each["peak_bytes"][method] - each["weight_bytes"][method]) / MIB for each in by_tokens.values()]
        in_tokens[f"{method}, MiB above the weights a token"] = fit(batches, above)
    in_rank = {}
    by_rank, ranks = found["rank"], found["ranks"]
    for method in ("logra", "lora"):
        names = [f"{method}:{rank}" for rank in ranks]
        frozen = by_rank["peak_bytes"]["frozen"]
        in_rank[f"{method}, MiB above frozen a rank"] = fit(
            ranks, [(by_rank["peak_bytes"][name] - frozen) / MIB for name in names]
        )
        in_rank[f"{method}, 1e9 operations a rank"] = fit(ranks, [by_rank["operations"][name] / 1e9 for name in names])
        in_rank[f"{method}, ms a rank"] = fit(ranks, [1e3 * by_rank["seconds"][name] for name in names])
    return {"tokens": in_tokens, "rank": in_rank}


def show(found: dict[str, Any], console: Console) -> None:
    """Print the fitted slopes, and the ratios to dense by width."""
    for of, fits in found["slopes"].items():
        table = Table(f"against {of}", "slope", "at zero", "variance explained", "exponent of the last step")
        for name, row in fits.items():
            cells = (f"{row[key]:.4g}" for key in ("slope", "intercept"))
            table.add_row(name, *cells, f"{row['explained']:.4f}", f"{row['exponent']:.2f}")
        console.print(table)
    table = Table("model", "width", "method", "step / dense", "bound", "peak / dense")
    for model, (width, each) in zip(found["models"], found["width"].items(), strict=True):
        for method, ratio in each["ratio_to_dense"].items():
            memory = each["peak_bytes"][method] / each["peak_bytes"]["dense"]
            table.add_row(model, str(width), method, f"{ratio:.3f}", f"{each['bound'][method]:.3f}", f"{memory:.3f}")
    console.print(table)
    console.print(f"one decoder layer each; against tokens and rank of {found['models'][0]}")


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Six plots as one picture: seconds and memory against tokens, rank and width; its kind is that of the name."""
    by_rank, ranks = found["rank"], found["ranks"]
    of_rank = {rank: {name: by_rank[name] for name in ("seconds", "peak_bytes")} for rank in ranks}
    for rank, each in of_rank.items():
        for key, values in each.items():
            each[key] = {name: value for name, value in values.items() if name in ("frozen", "dense")}
            each[key] |= {name: by_rank[key][f"{name}:{rank}"] for name in ("logra", "lora")}
    batches = {each["tokens"]: each for each in found["tokens"].values()}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.5, 6), layout="constrained")
        for column, (label, by) in enumerate((("tokens", batches), ("rank", of_rank), ("width", found["width"]))):
            for row, (key, unit, what) in enumerate((("seconds", 1, "seconds"), ("peak_bytes", MIB, "peak, MiB"))):
                axes = figure.add_subplot(2, 3, 1 + 3 * row + column, xlabel=label, ylabel=what)
                for method in next(iter(by.values()))[key]:
                    kind = method.partition(":")[0]
                    colour, line = LOOKS[kind]
                    heights = [each[key][method] / unit for each in by.values()]
                    axes.plot([int(x) for x in by], heights, line, color=colour, marker="o", markersize=4, label=kind)
                axes.set_ylim(bottom=0)
        handles = dict(zip(*reversed(figure.axes[0].get_legend_handles_labels()), strict=True))
        figure.legend(handles.values(), handles.keys(), loc="outside upper left", ncols=len(handles))
        figure.savefig(file)
