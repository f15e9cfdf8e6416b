"""A weight's fingerprint: 64 bits that any holder of a part can add to (ours; for the exact sync of §2.2).

    F(W) = Σ_ij h(i k + j, bits of W_ij)  mod 2^64

h is a hash of position and bits, so a changed bit or an exchanged row changes F, and parts of a matrix, however they
are cut, add up to it. Trainer and engine compare 64 bits a matrix where they would have to send the matrix.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from logra_ref.projection import hash_words
from logra_ref.sync import nudge_ties_

AT_ONCE = 2**24  # entries that are hashed at a time; each takes some 40 bytes meanwhile
BITS = {torch.float32: (torch.int32, 32), torch.bfloat16: (torch.int16, 16)}


def fingerprint(weight: Float[Tensor, "*part"], positions: Int[Tensor, "*part"]) -> Int[Tensor, ""]:
    """The share of F of the entries given, int64; ``positions`` are their i k + j in the whole matrix, below 2^31.

    Raises ``ValueError`` for a dtype other than fp32 and bf16.
    """
    if weight.dtype not in BITS:
        raise ValueError(f"only fp32 and bf16 weights have a fingerprint, not {weight.dtype}")
    view, width = BITS[weight.dtype]
    bits = weight.detach().contiguous().view(view).to(torch.int64) & (2**width - 1)
    return hash_words(0, (positions << 32) | bits).sum()


def positions(rows: range, width: int, device: torch.device | str = "cpu") -> Int[Tensor, "rows k"]:
    """i k + j for some rows i of a matrix with ``width`` columns."""
    row = torch.arange(rows.start, rows.stop, device=device)[:, None]
    return row * width + torch.arange(width, device=device)


@torch.no_grad()
def fingerprints(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> dict[str, int]:
    """Of each fp32 weight, F of what an engine should have that computes in ``dtype``."""
    found = {}
    for name, weight in weights:
        width, total = weight[0].numel(), 0
        for start in range(0, len(weight), step := max(1, AT_ONCE // width)):
            part = weight[start : start + step].clone()
            if dtype == torch.bfloat16:
                nudge_ties_(part)
            where = positions(range(start, start + len(part)), width, part.device).reshape(part.shape)
            total += int(fingerprint(part.to(dtype), where))
        found[name] = total
    return found
