"""What the notebooks have in common: a setting, and how figures and plots are shown."""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from IPython.display import Image, Markdown
from matplotlib.figure import Figure

from validation.claim import Comparison, Measurement, Setting
from validation.figures.style import image
from validation.ledger import judge
from validation.text import figures, row, told_apart, without


def begin(*, quick: bool = True, seed: int = 0) -> Setting:
    """The setting of a notebook. One thread, so that sums have one order and every machine prints the same digits."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="IProgress not found")  # of tqdm, inside transformers
    os.environ["HF_HUB_OFFLINE"] = "1"
    root = Path(__file__).parents[1]
    return Setting(seed=seed, quick=quick, models=root / os.environ.get("LOGRA_MODELS", "models"))


def comparisons(found: Measurement) -> Markdown:
    """The figures of a measurement as a table, with the verdict."""
    rows = ["| figure | expected | measured | tolerance | with a wrong formula |", "|---|---|---|---|---|"]
    rows += [_row(c) for c in found.comparisons]
    verdict, reason = judge(found)
    said = f"**{verdict}**{without(found.not_measured)}" + (f": {reason}" if reason else "")
    return Markdown("\n".join(rows) + f"\n\n{said}")


def _row(c: Comparison) -> str:
    # A hundredth of the tolerance is all that is shown: digits beyond it are another machine's rounding errors.
    digits = 15 if c.tolerance == 0 else 2 - math.floor(math.log10(c.tolerance))
    expected, measured, tolerance = figures(vars(replace(c, measured=round(c.measured, digits))))
    wrong = f"{told_apart(c.control_measured, c.expected)} ({c.control})"
    return row(c.what, f"{expected}<br>{c.oracle}", measured, f"{tolerance}: {c.reason}", wrong)


def show(figure: Figure) -> Image:
    """A plot, as an image that lies in the notebook."""
    return Image(image(figure, "png"))
