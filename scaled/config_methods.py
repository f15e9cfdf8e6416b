"""The settings of the methods that LoGRA is compared with."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from scaled.section import Count, CountOrZero, Fraction, NonNegative, Positive, Section


class DenseConfig(Section):
    """Dense Adam, the paper's baseline."""

    lr: Positive = 1e-6
    """The learning rate after warm-up."""
    lr_min: NonNegative = 1e-7
    """The learning rate from update `horizon` on."""
    warmup: CountOrZero = 9
    """Updates of linear warm-up."""
    horizon: Count = 300
    """Updates over which the learning rate falls as a cosine."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Adam's decays."""
    epsilon: Positive = 1e-8
    """Adam's ε."""
    parameters: Literal["targets", "all"] = "targets"
    """Train the same matrices as LoGRA, or every parameter."""

    @model_validator(mode="after")
    def _falls(self) -> DenseConfig:
        if self.lr_min > self.lr:
            raise ValueError(f"`lr_min` {self.lr_min} is above `lr` {self.lr}")
        return self


class LoraConfig(Section):
    """LoRA adapters on the same layers, for comparison (the paper's settings)."""

    rank: Annotated[int, Field(gt=0, le=2**20)] = 256
    """r of the adapters."""
    alpha: Positive | None = None
    """α of the adapters, whose product is scaled by α/r; r if it is not given."""
    lr: Positive = 2e-4
    """AdamW's learning rate, the same throughout."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's decays."""
    epsilon: Positive = 1e-8
    """AdamW's ε."""
