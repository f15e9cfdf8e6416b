"""Responses sampled in process from a Hugging Face model, with the log-probability of every token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from logra_ref.rl import token_log_probs
from scaled.batching import shared_beginning
from scaled.errors import NumericalTrouble, UserError
from scaled.model import evaluating
from scaled.records import Problem, Response
from scaled.rollout.prompts import EndOfResponse, Prompt, encode_prompts, room_after


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    *,
    max_new_tokens: int | None,
    context: int | None = None,
    temperature: float,
    top_p: float = 1.0,
    seed: int,
    numbers: Sequence[int] | None = None,
    stop: Sequence[str] = (),
    batch: int = 64,
    advance: Callable[[int], None] | None = None,
) -> list[Response]:
    """One response to each problem, in order: sampled from the whole softmax, or greedy at temperature 0.

    ``top_p`` below 1 samples from the likeliest tokens alone that have so much of the probability (``choose_tokens``).
    A response ends at an end of turn, at the first of the ``stop`` strings in its text, after ``max_new_tokens``, or
    where prompt and response have ``context`` tokens.
    What is drawn follows from ``seed``, the response's number (by default its index) and the token's position, and so
    depends on ``batch`` by rounding errors of the logits at most. ``advance`` is told the number of responses just
    finished. Raises ``UserError``, before the model runs, for a prompt that leaves no room for its response and for a
    model without a plain cache of keys and values, and ``NumericalTrouble`` for logits that are not finite.
    """
    _check_cache(model)
    prompts = encode_prompts(model, tokenizer, problems, max_new_tokens, context)
    ends = EndOfResponse(model, tokenizer, stop)
    limits = [room_after(prompt, max_new_tokens, context) for prompt in prompts]
    rows = [
        _Row(prompt, limit, None if temperature == 0 else _uniforms(seed, number, limit))
        for number, prompt, limit in zip(
            range(len(prompts)) if numbers is None else numbers, prompts, limits, strict=True
        )
    ]
    by_length = sorted(rows, key=lambda row: len(row.prompt))
    with evaluating(model):
        for start in range(0, len(rows), batch):
            _respond(model, by_length[start : start + batch], temperature, top_p, ends, advance)
    return [
        Response(
            problem=problem,
            prompt_ids=row.prompt,
            token_ids=tuple(row.tokens),
            log_probs=tuple(row.log_probs),
            text=ends.text(row.tokens),
            stop_reason="stop" if row.stopped else "length",
        )
        for problem, row in zip(problems, rows, strict=True)
    ]


@dataclass
class _Row:
    """A response in the making."""

    prompt: Prompt
    limit: int
    uniforms: np.ndarray | None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    stopped: bool = False


@torch.no_grad()
def _respond(
    model: PreTrainedModel,
    rows: list[_Row],
    temperature: float,
    top_p: float,
    ends: EndOfResponse,
    advance: Callable[[int], None] | None,
) -> None:
    """Fill in the responses of one batch, token by token."""
    hidden, cache = _prefill(model, [row.prompt for row in rows])
    prompt_slots = cache.get_seq_length()
    while True:
        logits = model.get_output_embeddings()(hidden)
        position = len(rows[0].tokens)
        uniforms = None if temperature == 0 else np.array([row.uniforms[position] for row in rows])
        tokens, log_probs = choose_tokens(logits, temperature, uniforms, top_p)
        for row, token, log_prob in zip(rows, tokens.tolist(), log_probs.tolist(), strict=True):
            row.tokens.append(token)
            row.log_probs.append(log_prob)
            row.stopped = ends.reached(row.tokens)
        going = [i for i, row in enumerate(rows) if not row.stopped and position + 1 < row.limit]
        if advance and len(going) < len(rows):
            advance(len(rows) - len(going))
        if not going:
            return
        if len(going) < len(rows):
            rows = [rows[i] for i in going]
            kept = torch.tensor(going, device=model.device)
            tokens = tokens[kept]
            cache.batch_select_indices(kept)
        lengths = torch.tensor([len(row.prompt) for row in rows], device=model.device)
        hidden = model.base_model(
            input_ids=tokens[:, None],
            position_ids=(lengths + position)[:, None],
            attention_mask=_pad_mask(lengths, prompt_slots, position + 1),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[:, -1]


def _prefill(model: PreTrainedModel, prompts: list[Prompt]) -> tuple[Tensor, DynamicCache]:
    """The hidden state (b, h) at the end of each prompt, and the cache, with pads at its left.

    What all prompts begin with is run once, and equal prompts are; the rest is padded on the right, where causal
    attention makes a mask unnecessary.
    """
    distinct = list(dict.fromkeys(prompts))
    shared = shared_beginning(distinct)
    # Without the model's configuration every layer keeps all it has seen, also where attention is a sliding window.
    cache = DynamicCache()
    if shared:
        beginning = torch.tensor([distinct[0][:shared]], device=model.device)
        model.base_model(input_ids=beginning, past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(len(distinct))
    rests = [torch.tensor(prompt[shared:]) for prompt in distinct]
    hidden = model.base_model(
        input_ids=torch.nn.utils.rnn.pad_sequence(rests, batch_first=True).to(model.device),
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    row_of = {prompt: i for i, prompt in enumerate(distinct)}
    index = torch.tensor([row_of[prompt] for prompt in prompts], device=model.device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=model.device)
    _move_pads_left(cache, index, lengths)
    return hidden[index, lengths - shared - 1], cache


def _move_pads_left(cache: DynamicCache, index: Tensor, lengths: Tensor) -> None:
    """Give each response its row of the cache, turned so that it ends with the prompt's last token.

    So the distance of two slots is that of their tokens, as sliding windows need it; rotary embeddings are applied
    before the cache and move along.
    """
    slots = cache.get_seq_length()
    if len(index) == cache.layers[0].keys.shape[0] and bool((lengths == slots).all()):
        return
    turned = (torch.arange(slots, device=index.device) + lengths[:, None]) % slots  # pads are slots - lengths
    for layer in cache.layers:
        layer.keys = layer.keys.transpose(1, 2)[index[:, None], turned].transpose(1, 2)
        layer.values = layer.values.transpose(1, 2)[index[:, None], turned].transpose(1, 2)


def _pad_mask(lengths: Tensor, prompt_slots: int, new: int) -> Tensor | None:
    """Which slots (b, prompt_slots + new) of the cache a response may look at; None if there are no pads."""
    pads = prompt_slots - lengths
    if not pads.any():
        return None
    return torch.arange(prompt_slots + new, device=lengths.device) >= pads[:, None]


def choose_tokens(
    logits: Tensor, temperature: float, uniforms: np.ndarray | None, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Tokens (b,) for logits (b, v), and their log-probabilities at the temperature (greedy: at temperature 1).

    Sampled by inversion: a uniform number (b, in [0, 1)) picks the token at which the cumulated probabilities pass it.
    With ``top_p`` below 1, both are of the distribution that is left (``nucleus``).
    """
    if uniforms is None:
        tokens, temperature = logits.argmax(-1), 1.0
    else:
        if top_p < 1:
            logits = nucleus(logits.float(), temperature, top_p)
        cumulated = torch.softmax(logits.float() / temperature, dim=-1).double().cumsum(-1)
        # 1 − u lies in (0, 1]: the first token to reach its share of the sum exists, and has a probability above 0.
        wanted = (1 - torch.from_numpy(uniforms).to(logits.device)[:, None]) * cumulated[:, -1:]
        # Beyond the last token there are only NaN, for which the log-probability is NaN as well.
        tokens = torch.searchsorted(cumulated, wanted).squeeze(1).clamp(max=logits.shape[-1] - 1)
    log_probs = token_log_probs(logits, tokens, temperature)
    if not torch.isfinite(log_probs).all():
        raise NumericalTrouble("the model's logits are not finite, and no response can be sampled from them")
    return tokens, log_probs


def nucleus(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Logits (b, v) with −∞ for all but the likeliest tokens: the fewest whose probabilities at the temperature make
    ``top_p`` or more, at least one."""
    probabilities, order = torch.softmax(logits / temperature, dim=-1).double().sort(dim=-1, descending=True)
    beyond = probabilities.cumsum(-1) - probabilities >= top_p  # those before it are enough
    return logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -math.inf)


def _uniforms(seed: int, number: int, count: int) -> np.ndarray:
    """Numbers in [0, 1) for the positions of one response; a longer sequence begins with the shorter."""
    return np.random.default_rng((seed, number)).random(count)


def _check_cache(model: PreTrainedModel) -> None:
    layers = DynamicCache(config=model.config).layers
    if other := {type(layer).__name__ for layer in layers} - {"DynamicLayer", "DynamicSlidingWindowLayer"}:
        raise UserError(
            f"{type(model).__name__} keeps more than keys and values while it writes ({', '.join(sorted(other))}), and "
            "padding would disturb that; choose a model whose layers are all attention"
        )
