"""The one error a person is shown without a traceback."""

from __future__ import annotations


class UserError(Exception):
    """Something outside the program is wrong: the text names the thing, the value and the remedy."""


class NumericalTrouble(Exception):
    """An update was refused because a loss, a sketch or the predicted KL was not finite; the weights are untouched."""
