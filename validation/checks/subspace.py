"""C06: with refreshed projections the sum of updates is not confined to rank r; with a fixed one it is (§2.2)."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from jaxtyping import Float
from sympy import ZZ
from sympy.polys.matrices import DomainMatrix
from torch import Tensor, nn

from logra_ref import LoGRA, attach_sketches
from logra_ref.projection import Projection, projection_seed
from logra_ref.update import merge_rows_
from validation.claim import Comparison, Measurement, Setting, claim

ROWS, COLUMNS, RANK, UPDATES = 40, 48, 4, 12
BELOW = 1e-9  # singular values that are smaller than this times the largest are rounding errors


def exact_rank(matrix: Float[Tensor, "d k"]) -> int:
    """The rank of a matrix of whole numbers, over the rational numbers."""
    rows = [[ZZ(int(x)) for x in row] for row in matrix.tolist()]
    return DomainMatrix(rows, tuple(matrix.shape), ZZ).to_field().rank()


def numerical_rank(matrix: Float[Tensor, "d k"]) -> int:
    """The number of singular values above a billionth of the largest."""
    values = torch.linalg.svdvals(matrix)
    return int((values > BELOW * values[0]).sum())


def ranks_of_sums(setting: Setting, drawn_for: Sequence[int]) -> list[int]:
    """The exact rank of −Σ_u U_u E_u after each update, U_u whole numbers at random.

    ``drawn_for`` holds for each update the number that its projection is drawn for: 1, 2, 3, … with refresh.
    """
    generator, base = setting.generator("factors"), setting.derived_seed("projections")
    weight = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    ranks = []
    for update in drawn_for:
        levels = torch.randint(-9, 10, (ROWS, RANK), generator=generator).double()
        projection = Projection("rademacher", RANK, COLUMNS, projection_seed(base, update, "w"))
        merge_rows_(weight, levels, torch.ones(ROWS, dtype=torch.float64), projection)
        ranks.append(exact_rank(weight))
    return ranks


def trained(setting: Setting, refresh: str, updates: int) -> Float[Tensor, "d k"]:
    """W after some updates minus W before: the optimizer itself on a linear layer, with random data."""
    generator = setting.generator("data")
    model = nn.Sequential()
    model.add_module("up_proj", nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.float64))
    with torch.no_grad():
        model.up_proj.weight.copy_(torch.randn(ROWS, COLUMNS, generator=generator))
    start = copy.deepcopy(model.up_proj.weight.detach())
    sketches = attach_sketches(model, RANK, targets=["up_proj"], seed=setting.derived_seed("optimizer"))
    optimizer = LoGRA(sketches, update_ratio=1e-2, refresh=refresh)
    for _ in range(updates):
        optimizer.zero_grad()
        x, y = (torch.randn(64, n, dtype=torch.float64, generator=generator) for n in (COLUMNS, ROWS))
        (model(x) - y).square().sum().backward()
        optimizer.step()
    return model.up_proj.weight.detach() - start


def expected_rank(updates: int, refreshed: bool) -> int:
    """min(t·r, d, k) with refresh, min(r, d, k) with a fixed projection."""
    return min(updates * RANK if refreshed else RANK, ROWS, COLUMNS)


@claim("C06", "with refresh, the sum of updates is not confined to rank r; fixed, it is", "§2.2")
def rank_of_the_sum(setting: Setting) -> Measurement:
    """Ranks in exact arithmetic on whole numbers, and of the optimizer's own updates by singular values."""
    steps = range(1, UPDATES + 1)
    refreshed = ranks_of_sums(setting, list(steps))
    fixed = ranks_of_sums(setting, [1] * UPDATES)
    grown = {refresh: trained(setting, refresh, UPDATES // 2) for refresh in ("every_update", "fixed")}
    ranks = {refresh: numerical_rank(change) for refresh, change in grown.items()}
    values = {refresh: torch.linalg.svdvals(change) for refresh, change in grown.items()}
    half = UPDATES // 2
    relative = values["every_update"] / values["every_update"][0]
    chance = 1e-10  # two of 48 rows of signs equal or opposite: 1128 · 2 · 2⁻⁴⁸, and other dependencies are rarer
    shape = f"({ROWS}, {COLUMNS}), r = {RANK}"
    return Measurement(
        [
            Comparison(
                f"rank of the sum of {half} updates, A refreshed, {shape}",
                expected=expected_rank(half, True),
                measured=refreshed[half - 1],
                tolerance=0,
                reason="a rank of whole numbers, without rounding",
                oracle="min(t·r, d, k)",
                control="a seed without the update number",
                control_measured=fixed[half - 1],
                chance=chance,
            ),
            Comparison(
                f"updates of {UPDATES} after which the rank is min(t·r, d, k)",
                expected=UPDATES,
                measured=sum(rank == expected_rank(t, True) for t, rank in zip(steps, refreshed, strict=True)),
                tolerance=0,
                reason="a rank of whole numbers, without rounding",
                oracle="min(t·r, d, k)",
                control="a seed without the update number",
                control_measured=sum(rank == expected_rank(t, True) for t, rank in zip(steps, fixed, strict=True)),
                chance=chance,
            ),
            Comparison(
                f"rank of the sum of {UPDATES} updates, A fixed",
                expected=expected_rank(UPDATES, False),
                measured=fixed[-1],
                tolerance=0,
                reason="a rank of whole numbers, without rounding",
                oracle="r: every update has its rows in the span of the same r rows",
                control="A refreshed",
                control_measured=refreshed[-1],
                chance=chance,
            ),
            Comparison(
                f"numerical rank of W − W₀ after {half} updates of the optimizer, refreshed",
                expected=expected_rank(half, True),
                measured=ranks["every_update"],
                tolerance=0,
                reason="rounding errors lie below 1e-14 of the largest singular value, the rest above 1e-2",
                oracle="min(t·r, d, k)",
                control="refresh: fixed",
                control_measured=ranks["fixed"],
                chance=chance,
            ),
            Comparison(
                f"numerical rank of W − W₀ after {half} updates of the optimizer, A fixed",
                expected=RANK,
                measured=ranks["fixed"],
                tolerance=0,
                reason="rounding errors lie below 1e-14 of the largest singular value, the rest above 1e-2",
                oracle="r",
                control="refresh: every update",
                control_measured=ranks["every_update"],
                chance=chance,
            ),
        ],
        note="Relative to the largest singular value of the optimizer's W − W₀, the smallest that counts is "
        f"{float(relative[half * RANK - 1]):.0e}, the next {float(relative[half * RANK]):.0e}.",
        data={
            "refreshed": refreshed,
            "fixed": fixed,
            "expected": [expected_rank(t, True) for t in steps],
            "most": min(ROWS, COLUMNS),
            "trained": half,
            "below": BELOW,
            "singular values": {
                name: [max(float(f"{x:.3g}"), 1e-18) for x in (v / v[0]).tolist()] for name, v in values.items()
            },
        },
    )
