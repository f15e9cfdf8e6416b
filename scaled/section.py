"""What the sections of the configuration are made of: bounded numbers, and how a section is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator


def _path(value: Any) -> Any:
    """``~`` is the home folder; ``~name`` stays where there is no such user. An empty text would be this folder."""
    if isinstance(value, str):
        if not value.strip():
            raise ValueError("must name a file or folder; an empty text names none")
        return os.path.expanduser(value)
    return value


Text = Annotated[str, Field(min_length=1)]
MOST = 1e6  # no setting makes sense beyond it, and products of larger ones overflow fp32
# Beyond any run there was, and what is listed so many times still fits in memory: more would hang without a word.
MOST_COUNTED = 10**6
Count = Annotated[int, Field(gt=0, le=MOST_COUNTED)]
CountOrZero = Annotated[int, Field(ge=0, le=MOST_COUNTED)]
Finite = Annotated[float, Field(ge=-MOST, le=MOST, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, le=MOST, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=MOST, allow_inf_nan=False)]
Temperature = Annotated[float, Field(ge=1e-3, le=MOST, allow_inf_nan=False)]
LocalPath = Annotated[Path, BeforeValidator(_path)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class Section(BaseModel):
    """A part of the configuration. Unknown keys are errors; the text under a field explains it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number_and_no_nul(cls, value: Any, info: ValidationInfo) -> Any:
        # Lax mode is needed (YAML 1.1 reads 1e-3 as text), but it would also take `rank: true` for 1.
        items = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(item, str) and "\0" in item for item in items):
            raise ValueError("must not hold the character NUL")
        if cls.model_fields[info.field_name].annotation is not bool and any(isinstance(item, bool) for item in items):
            raise ValueError("must not be true or false (yes, no, on and off are the same in YAML)")
        return value


class Numbers(BaseModel):
    """A part of a checkpoint's numbers: what is of another type, or no number, is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @classmethod
    def read(cls, numbers: Any) -> Self:
        """Raises ``ValueError`` that names the first number which is none."""
        try:
            return cls.model_validate(numbers)
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]
            text = f"`{'.'.join(map(str, wrong['loc']))}` is {wrong['input']!r:.60}: {wrong['msg']}"
            raise ValueError(text) from None
