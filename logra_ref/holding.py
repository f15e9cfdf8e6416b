"""Who holds which rows: one holder all of them, or several some each.

Row i of W, S, U and of RowAdam's second moment belong together, and most of the method treats rows one by one. What
does not asks the ``Holding``: the sum of a number over all holders, a contribution to S summed over all of them, the
whole of U where a layer computes with it. How that is done, and by whom, is no matter of the method's.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

Total = Callable[[Tensor], Tensor]
"""Sums a tensor over all holders of rows; identity if one holds them all."""


def identity(x: Tensor) -> Tensor:
    """The sum over all holders when there is one."""
    return x


class Holding:
    """One holder has all rows. Another holding overrides what differs."""

    def total(self, x: Tensor) -> Tensor:
        """The sum of ``x`` over all holders, the same for each of them."""
        return identity(x)

    def own(self, weight: Tensor) -> Float[Tensor, "own k"]:
        """The rows of a weight (d, k) that are held here, to be read and changed in place."""
        return weight.detach()

    def collect(self, contribution: Float[Tensor, "d r"], add: Callable[[Float[Tensor, "own r"]], None]) -> None:
        """Sum a contribution over all holders and ``add`` the rows of the sum that are held here; at the latest when
        the backward pass ends. Every holder calls this for the same layers in the same order."""
        add(contribution)

    def whole(self, rows: Float[Tensor, "own r"], count: int) -> Float[Tensor, "d r"]:
        """All ``count`` rows, from every holder's own."""
        return rows


WHOLE = Holding()
