"""Attention for forward mode: softmax(q kᵀ) v for some queries at a time, in operations that all have a derivative.

torch's fused attentions have no forward mode, and its plain one holds the (l, l) scores of every head. This one holds
those of ``QUERIES`` queries, so that its memory grows with the length of a sequence and not with its square.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from scaled.errors import UserError

NAME = "logra_in_chunks"
QUERIES = 256


@contextmanager
def attention_in_chunks(model: PreTrainedModel) -> Iterator[None]:
    """Inside, every layer of the model attends by ``chunked_attention``.

    Raises ``UserError`` for a model that does not let its attention be chosen.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise UserError(
            f"{type(model).__name__} has an attention of its own, which may have no forward mode; set "
            "control.probe=finite_difference"
        )
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def chunked_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention as transformers calls it: query (b, heads, l, h), key and value (b, kv heads, l', h), l' ≥ l.

    The last query stands at the last key; earlier keys are those of a cache. Softmax in fp32 at least. There is no
    mask for pads: they stand to the right, where nothing looks. Returns (b, l, heads, h).
    """
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    if unknown or attention_mask is not None or dropout:
        raise UserError(
            f"the JVP probe does not know attention with {unknown[0] if unknown else 'masks or dropout'}; set "
            "control.probe=finite_difference"
        )
    heads, length = query.shape[1:3]
    groups, before = heads // key.shape[1], key.shape[2] - length
    key_positions = torch.arange(key.shape[2], device=query.device)
    pieces = []
    for start in range(0, length, QUERIES):
        stop = min(start + QUERIES, length)
        last = before + stop  # later keys are nobody's of this piece
        first = 0 if sliding_window is None else max(0, before + start - sliding_window + 1)
        # Heads that share keys stand below one another, so that keys need no copies.
        asked = query[:, :, start:stop].unflatten(1, (-1, groups)).flatten(2, 3)
        scores = (asked @ key[:, :, first:last].mT * scaling).unflatten(2, (groups, stop - start))
        distance = (before + torch.arange(start, stop, device=query.device))[:, None] - key_positions[first:last]
        seen = distance >= 0
        if sliding_window is not None:
            seen &= distance < sliding_window
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(~seen, -torch.inf)
        shares = torch.softmax(scores, dim=-1).to(value.dtype)
        found = shares.flatten(2, 3) @ value[:, :, first:last]
        pieces.append(found.unflatten(2, (groups, stop - start)).flatten(1, 2))
    return torch.cat(pieces, dim=2).transpose(1, 2), None


AttentionInterface.register(NAME, chunked_attention)
