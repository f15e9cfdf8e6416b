"""A weight's fingerprint: 64 bits that any holder of a part can add to (ours; for the exact sync of §2.2).

    F(W) = Σ_ij h(i k + j, bits of W_ij)  mod 2^64

h is a hash of position and bits, so a changed bit or an exchanged row changes F, and parts of a matrix, however they
are cut, add up to it. Trainer and engine compare 64 bits a matrix where they would have to send the matrix.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from logra_ref.projection import hash_words

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
