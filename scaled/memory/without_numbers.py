"""What torch and transformers do otherwise for tensors without numbers, put right for as long as a block lasts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd import forward_ad
from transformers import masking_utils


@contextmanager
def rates_laid_out_as_values() -> Iterator[None]:
    """A value that is a part of a larger storage has a rate in one of that size. torch makes it so for tensors with
    numbers; for others it fails."""
    before = forward_ad.make_dual

    def make_dual(value: Tensor, rate: Tensor) -> Tensor:
        room = value.untyped_storage().nbytes() // value.element_size()
        if room * rate.element_size() != rate.untyped_storage().nbytes():
            rate = rate.new_empty(room).as_strided(value.size(), value.stride(), value.storage_offset())
        return before(value, rate)

    forward_ad.make_dual = make_dual
    try:
        yield
    finally:
        forward_ad.make_dual = before


@contextmanager
def no_masks() -> Iterator[None]:
    """transformers makes an (l, l) mask for tensors without numbers, which it does without for others."""
    before = masking_utils.is_tracing
    masking_utils.is_tracing = lambda tensor=None: False
    try:
        yield
    finally:
        masking_utils.is_tracing = before


@contextmanager
def silent() -> Iterator[None]:
    """Without torch's warnings, which are about the CPU that nothing is computed on."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
