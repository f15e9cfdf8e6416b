"""Responses as tensors: microbatches, the logits at their response positions, and the choice of the probe's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from scaled.records import Response


@dataclass(frozen=True)
class Batch:
    """Some responses of a global batch behind their prompts, padded on the right.

    There is no attention mask: a causal model does not look at what stands to the right, so pads change nothing. The
    last token of a response is left out, as nothing is predicted from it.
    """

    input_ids: Tensor
    """(b, l) int64."""
    predicts: Tensor
    """(b, l) bool: whether the next token is one of the response's."""
    targets: Tensor
    """(p,) int64: the sampled tokens, in row-major order of ``predicts``."""
    rollout_log_probs: Tensor
    """(p,) float32: their log-probabilities when they were sampled."""
    response: Tensor
    """(p,) int64: the index of each token's response in the global batch."""
    shared: int
    """How many tokens all prompts begin with, at most all but the last of the shortest."""


def collate(responses: Sequence[Response], indices: Sequence[int], pad_id: int, device: torch.device) -> Batch:
    """The chosen responses as one batch."""
    chosen = [responses[index] for index in indices]
    ids = [torch.tensor(response.prompt_ids + response.token_ids[:-1]) for response in chosen]
    input_ids = pad_sequence(ids, batch_first=True, padding_value=pad_id)
    column = torch.arange(input_ids.shape[1])
    first = torch.tensor([len(response.prompt_ids) - 1 for response in chosen])[:, None]
    lengths = torch.tensor([len(response.token_ids) for response in chosen])
    return Batch(
        input_ids=input_ids.to(device),
        predicts=((column >= first) & (column < first + lengths[:, None])).to(device),
        targets=torch.tensor([token for response in chosen for token in response.token_ids], device=device),
        rollout_log_probs=torch.tensor(
            [log_prob for response in chosen for log_prob in response.log_probs], dtype=torch.float32, device=device
        ),
        response=torch.tensor(list(indices)).repeat_interleave(lengths).to(device),
        shared=shared_beginning([response.prompt_ids for response in chosen]),
    )


def microbatches(
    responses: Sequence[Response], indices: Iterable[int], size: int, pad_id: int, device: torch.device
) -> list[Batch]:
    """The chosen responses in batches of at most ``size``, those of like length together so that pads are few."""
    by_length = sorted(indices, key=lambda index: len(responses[index].prompt_ids) + len(responses[index].token_ids))
    return [
        collate(responses, by_length[start : start + size], pad_id, device) for start in range(0, len(by_length), size)
    ]


def no_response(pad_id: int, device: torch.device) -> Batch:
    """A batch of one pad and no response: what a rank runs while others have one more, since all gather weights."""
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return Batch(
        input_ids=torch.full((1, 1), pad_id, device=device),
        predicts=torch.zeros(1, 1, dtype=torch.bool, device=device),
        targets=nothing,
        rollout_log_probs=nothing.float(),
        response=nothing,
        shared=0,
    )


def shared_beginning(prompts: Sequence[tuple[int, ...]]) -> int:
    """How many tokens all prompts begin with, at most all but the last of the shortest."""
    # In the order of dictionaries: what the first and the last begin with, all do.
    first, last = min(prompts), max(prompts)
    differ = (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return next(differ, min(len(first), len(last)) - 1)


def probe_indices(lengths: Sequence[int], *, positions: int | None, responses: int | None, seed: int) -> list[int]:
    """Responses drawn at random until they have ``positions`` tokens, or so many ``responses``; all if there are fewer.

    ``lengths`` are the tokens of every response of the global batch. The draw is over global indices, before any
    sorting, so it depends neither on lengths nor on how the batch is split.
    """
    drawn = np.random.default_rng(seed).permutation(len(lengths)).tolist()
    if positions is None:
        return drawn[:responses]
    reached = np.cumsum([lengths[index] for index in drawn])
    return drawn[: int(np.searchsorted(reached, positions)) + 1]
