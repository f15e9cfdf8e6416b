"""RowAdam by hand: Appendix B an entry at a time in 40 digits, and sketches to try it on."""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float
from mpmath import mp, mpf
from torch import Tensor

from logra_ref.direction import row_adam_direction
from logra_ref.projection import Projection, projection_seed
from validation.claim import Setting

BETA2, EPSILON = 0.95, 1e-8
BETA1 = 0.9  # Adam's, which RowAdam leaves out
UPDATES = 40
ROWS, WIDTH, RANK = 6, 48, 4
ROW_SIZES = (1e-6, 1e-3, 0.1, 1.0, 30.0, 1e4)  # norms of rows: the smallest are below ε times the mean
SIMILAR_SIZES = (0.3, 1.0, 1.0, 2.0, 3.0, 10.0)


def run_row_adam(sketches: list[Tensor]) -> list[Float[Tensor, "d r"]]:
    """U of each update by the code, the second moments handed on from one to the next."""
    moment, found = torch.zeros(len(sketches[0]), dtype=torch.float64), []
    for step, sketch in enumerate(sketches, 1):
        direction, moment = row_adam_direction(sketch, moment, step=step, beta2=BETA2, epsilon=EPSILON)
        found.append(direction)
    return found


def row_adam_by_hand(
    sketches: list[Tensor], *, corrected: bool = True, restored: bool = True, relative: bool = True
) -> list[Float[Tensor, "d r"]]:
    """Appendix B in 40 digits, an entry at a time; each switch leaves a part of it out.

    ``corrected``: divide v by 1 − β₂^t; ``restored``: give U the norm of S; ``relative``: multiply ε by the mean root.
    """
    mp.dps = 40
    beta, epsilon = mpf(BETA2), mpf(EPSILON)
    rows, rank = sketches[0].shape
    moment, found = [mpf(0)] * rows, []
    for t, sketch in enumerate(sketches, 1):
        s = [[mpf(x) for x in row] for row in sketch.tolist()]
        moment = [beta * v + (1 - beta) * sum(x * x for x in row) / rank for v, row in zip(moment, s, strict=True)]
        root = [mp.sqrt(v / (1 - beta**t) if corrected else v) for v in moment]
        shift = epsilon * (sum(root) / rows if relative else 1)
        u = [[x / (b + shift) for x in row] for b, row in zip(root, s, strict=True)]
        if restored:
            norms = [mp.sqrt(sum(x * x for row in m for x in row)) for m in (s, u)]
            u = [[x * norms[0] / norms[1] for x in row] for row in u]
        found.append(torch.tensor([[float(x) for x in row] for row in u], dtype=torch.float64))
    return found


def gradient_rows(setting: Setting, sizes: tuple[float, ...] = ROW_SIZES) -> Float[Tensor, "d k"]:
    """G whose rows have the given norms and random directions."""
    g = torch.randn(len(sizes), WIDTH, dtype=torch.float64, generator=setting.generator("rows"))
    return g / g.norm(dim=1, keepdim=True) * torch.tensor(sizes, dtype=torch.float64)[:, None]


def refreshed_sketches(setting: Setting, g: Float[Tensor, "d k"], updates: int, name: str = "A") -> list[Tensor]:
    """S of each update, of a gradient that wanders around ``g``, with A redrawn each time."""
    base, generator = setting.derived_seed(name), setting.generator(f"noise {name}")
    sketches = []
    for update in range(1, updates + 1):
        noise = torch.randn(g.shape, dtype=torch.float64, generator=generator) / math.sqrt(g.shape[1])
        projection = Projection("rademacher", RANK, g.shape[1], projection_seed(base, update, "w"))
        sketches.append(projection.project(g + 0.5 * noise * g.norm(dim=1, keepdim=True)))
    return sketches


def largest_change(found: list[Tensor], expected: list[Tensor]) -> float:
    """max over updates of ‖found − expected‖_F / ‖expected‖_F."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


def turned(found: list[Tensor], expected: list[Tensor]) -> float:
    """The same for U/‖U‖_F: how far the direction as a whole has turned."""
    return largest_change([u / u.norm() for u in found], [u / u.norm() for u in expected])


def norm_error(found: list[Tensor], sketches: list[Tensor]) -> float:
    """max over updates of |‖U‖_F / ‖S‖_F − 1|."""
    return max(abs(float(u.norm() / s.norm()) - 1) for u, s in zip(found, sketches, strict=True))


def run_of_updates(g: Float[Tensor, "d k"], base: int) -> dict[str, np.ndarray]:
    """The gradient G again and again, A redrawn for each update.

    Gives for each row v̂ r/‖g‖² after the first, an early and the last update and after all of them, and how much of
    G the last update would have along G, were it a first moment: ⟨M A_t, G⟩/‖G‖², A redrawn and A kept.
    """
    moment, first = torch.zeros(len(g), dtype=torch.float64), torch.zeros(len(g), RANK, dtype=torch.float64)
    course, square = [], g.square().sum(dim=1)
    for update in range(1, UPDATES + 1):
        projection = Projection("rademacher", RANK, g.shape[1], projection_seed(base, update, "w"), keep=True)
        sketch = projection.project(g)
        _, moment = row_adam_direction(sketch, moment, step=update, beta2=BETA2, epsilon=EPSILON)
        first = BETA1 * first + (1 - BETA1) * sketch
        course.append((moment / square * RANK).numpy())
        along = float((projection.lift(sketch) * g).sum() / square.sum())
    aligned = float((projection.lift(first) * g).sum() / square.sum()) / (1 - BETA1**UPDATES)
    return {"course": np.stack(course), "aligned": np.array(aligned), "kept": np.array(along)}


def predicted_variance(g: Float[Tensor, "d k"], updates: int) -> Float[np.ndarray, " d"]:
    """Var of v̂ r/‖g‖² after t updates with refreshed signs: (2/r)(1 − Σ p²) (1−β)(1+β^t)/((1+β)(1−β^t)),
    with p = g²/‖g‖².
    """
    share = (g.square() / g.square().sum(dim=1, keepdim=True)).numpy()
    single = 2 / RANK * (1 - np.square(share).sum(axis=1))
    return single * (1 - BETA2) * (1 + BETA2**updates) / ((1 + BETA2) * (1 - BETA2**updates))


def rows_before_and_after(setting: Setting) -> dict[str, list[float]]:
    """Root mean square of each row of S and of U after 8 updates."""
    sketches = refreshed_sketches(setting, gradient_rows(setting), 8)
    direction = run_row_adam(sketches)[-1]
    return {
        name: [float(f"{x:.3g}") for x in matrix.square().mean(dim=1).sqrt().tolist()]
        for name, matrix in (("S", sketches[-1]), ("U", direction))
    }
