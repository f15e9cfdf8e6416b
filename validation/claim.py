"""What a check is made of: figures beside their oracles, each with a tolerance, its reason and a negative control."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

Item = TypeVar("Item")


@dataclass(frozen=True)
class Comparison:
    """One measured figure, the figure expected, and what a deliberately wrong formula gives in its place.

    ``expected`` comes from ``oracle``, never from the code under test. The figure fits if it is within ``tolerance``
    (absolute, in the figure's unit) of what is expected, or on the right side of it (≤, ≥) but for the tolerance.
    ``control_measured`` is the same measurement with what ``control`` says made wrong: it must be a number and must
    not fit. ``chance`` is the probability that a right formula fails (0 where nothing is drawn). ``from_paper`` marks
    a figure that the paper measured on hardware or models that are not here: where ours is another, that is a
    difference to explain and no failure.
    """

    what: str
    expected: float
    measured: float
    tolerance: float
    reason: str
    oracle: str
    control: str
    control_measured: float
    relation: Literal["=", "≤", "≥"] = "="
    unit: str = ""
    chance: float = 0.0
    from_paper: bool = False

    def admits(self, figure: float) -> bool:
        """Whether a figure fits; NaN never does."""
        if self.relation == "≤":
            return figure <= self.expected + self.tolerance
        if self.relation == "≥":
            return figure >= self.expected - self.tolerance
        return abs(figure - self.expected) <= self.tolerance

    @property
    def fits(self) -> bool:
        return self.admits(self.measured)

    @property
    def control_failed(self) -> bool:
        """Whether the control failed as it must: by its value, not by being no number."""
        return math.isfinite(self.control_measured) and not self.admits(self.control_measured)


@dataclass(frozen=True)
class Measurement:
    """What a check found. The first comparison is the claim's headline; ``data`` is for the plots (JSON's types).

    ``note`` says in a sentence or two what a reader should know, and why where a figure of the paper is not met.
    ``not_measured`` names the parts of the check that could not be made here; their figures are not among the others.
    """

    comparisons: list[Comparison]
    note: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    not_measured: list[str] = field(default_factory=list)


class NotMeasured(Exception):
    """Raised by a check that cannot be made here; its text is the reason and the remedy."""


@dataclass(frozen=True)
class Setting:
    """What a check may depend on: the seed of its random numbers, how long it may take, where models lie.

    ``track`` wraps a loop that takes more than a few seconds, to show how far it is.
    """

    seed: int = 0
    quick: bool = False
    models: Path = Path("models")
    track: Callable[[Iterable[Item], str], Iterable[Item]] = lambda items, _: items

    def derived_seed(self, name: str) -> int:
        """A seed of 63 bits for one purpose: other names and other seeds have nothing in common with it."""
        text = f"logra/validation|{self.seed}|{name}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    def generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(self.derived_seed(name))

    def model_folder(self, name: str = "smollm2") -> Path:
        """The folder of a pretrained model. Raises ``NotMeasured`` where there is none, or a part of one."""
        folder = self.models / name
        if not folder.is_dir() or not any(folder.iterdir()):
            raise NotMeasured(f"the pretrained model is not in {folder}: get it by `logra model {name} {folder}`")
        for part in ("config.json", "model*.safetensors"):
            if not any(file.is_file() for file in folder.glob(part)):
                raise NotMeasured(
                    f"the folder is incomplete, {folder} has no {part}: remove it, then `logra model {name} {folder}`"
                )
        return folder


Check = Callable[[Setting], Measurement]


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, where it stands, and the check."""

    id: str
    statement: str
    where: str
    check: Check


REGISTRY: dict[str, Claim] = {}


def claim(id: str, statement: str, where: str) -> Callable[[Check], Check]:
    """Register the decorated function as the check of a claim."""

    def register(check: Check) -> Check:
        if id in REGISTRY:
            raise ValueError(f"claim {id} is registered twice: {REGISTRY[id].statement!r} and {statement!r}")
        REGISTRY[id] = Claim(id, statement, where, check)
        return check

    return register
