"""Responses sampled in process from a Hugging Face model, with the log-probability of every token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jinja2
import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from logra_ref.rl import token_log_probs
from scaled.batching import shared_beginning
from scaled.errors import NumericalTrouble, UserError
from scaled.model import evaluating
from scaled.records import Problem, Response

Prompt = tuple[int, ...]


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    numbers: Sequence[int] | None = None,
    stop: Sequence[str] = (),
    batch: int = 64,
    advance: Callable[[int], None] | None = None,
) -> list[Response]:
    """One response to each problem, in order: sampled from the whole softmax, or greedy at temperature 0.

    A response ends at an end of turn, at the first of the ``stop`` strings in its text, or after ``max_new_tokens``.
    What is drawn follows from ``seed``, the response's number (by default its index) and the token's position, and so
    depends on ``batch`` by rounding errors of the logits at most. ``advance`` is told the number of responses just
    finished. Raises ``UserError``, before the model runs, for a prompt that leaves no room for its response and for a
    model without a plain cache of keys and values, and ``NumericalTrouble`` for logits that are not finite.
    """
    _check_cache(model)
    prompts = encode_prompts(model, tokenizer, problems, max_new_tokens)
    ends = EndOfResponse(model, tokenizer, stop)
    rows = [
        _Row(prompt, None if temperature == 0 else _uniforms(seed, number, max_new_tokens))
        for number, prompt in zip(range(len(prompts)) if numbers is None else numbers, prompts, strict=True)
    ]
    by_length = sorted(rows, key=lambda row: len(row.prompt))
    with evaluating(model):
        for start in range(0, len(rows), batch):
            _respond(model, by_length[start : start + batch], max_new_tokens, temperature, ends, advance)
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


def encode_prompts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], max_new_tokens: int
) -> list[Prompt]:
    """The tokens of each problem's chat. Raises ``UserError`` for one that leaves no room for its response."""
    prompts = [encode_prompt(tokenizer, problem) for problem in problems]
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for problem, prompt in zip(problems, prompts, strict=True):
        if context is not None and len(prompt) + max_new_tokens > context:
            room = context - len(prompt)
            raise UserError(
                f"problem {problem.id}: its prompt of {len(prompt)} tokens and max_new_tokens = {max_new_tokens} make "
                f"more than the model's context of {context}; leave it out"
                + (f", or set rollout.max_new_tokens to {room} at most" if room > 0 else "")
            )
    return prompts


def encode_prompt(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> Prompt:
    """The tokens of the chat, up to where the model's answer begins or, if it is begun already, goes on.

    Raises ``UserError`` if the chat template refuses the chat, or changes how the started answer ends.
    """
    last = problem.messages[-1]
    started = last["role"] == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            list(problem.messages),
            tokenize=False,
            add_generation_prompt=not started,
            continue_final_message=started,
        )
    except (jinja2.TemplateError, ValueError) as error:
        raise UserError(f"problem {problem.id}: the model's chat template refuses its messages: {error}") from error
    if started and not text.endswith(last["content"]):
        raise UserError(
            f"problem {problem.id}: the model's chat template changes the started answer {last['content']!r}, of which "
            f"{text[-len(last['content']) :]!r} is left; most templates strip spaces, so start and end it without"
        )
    # The template has written the special tokens that belong there, the one of the beginning too.
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


class EndOfResponse:
    """What ends a response, and the text that is left of it: the semantics of vLLM."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        ids = model.generation_config.eos_token_id
        self.ids = {tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [ids])} - {None}
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        # A token has a byte of text at least; a few more, as the first character of a cut sequence may be broken.
        self._window = max((len(string.encode()) for string in self.stop), default=0) + 4

    def reached(self, tokens: list[int]) -> bool:
        """Whether the last token ends the response, if none before it did."""
        if tokens[-1] in self.ids:
            return True
        tail = self._decode(tokens[-self._window :]) if self.stop else ""
        return any(string in tail for string in self.stop)

    def text(self, tokens: list[int]) -> str:
        """The response without the end of turn or, if it has a stop string, up to there; no special tokens."""
        text = self._decode(tokens[:-1] if tokens[-1] in self.ids else tokens)
        return text[: min((at for string in self.stop if (at := text.find(string)) >= 0), default=len(text))]

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@dataclass
class _Row:
    """A response in the making."""

    prompt: Prompt
    uniforms: np.ndarray | None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    stopped: bool = False


@torch.no_grad()
def _respond(
    model: PreTrainedModel,
    rows: list[_Row],
    max_new_tokens: int,
    temperature: float,
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
        tokens, log_probs = choose_tokens(logits, temperature, uniforms)
        for row, token, log_prob in zip(rows, tokens.tolist(), log_probs.tolist(), strict=True):
            row.tokens.append(token)
            row.log_probs.append(log_prob)
            row.stopped = ends.reached(row.tokens)
        going = [i for i, row in enumerate(rows) if not row.stopped and position + 1 < max_new_tokens]
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


def choose_tokens(logits: Tensor, temperature: float, uniforms: np.ndarray | None) -> tuple[Tensor, Tensor]:
    """Tokens (b,) for logits (b, v), and their log-probabilities at the temperature (greedy: at temperature 1).

    Sampled by inversion: a uniform number (b, in [0, 1)) picks the token at which the cumulated probabilities pass it.
    """
    if uniforms is None:
        tokens, temperature = logits.argmax(-1), 1.0
    else:
        cumulated = torch.softmax(logits.float() / temperature, dim=-1).double().cumsum(-1)
        # 1 − u lies in (0, 1]: the first token to reach its share of the sum exists, and has a probability above 0.
        wanted = (1 - torch.from_numpy(uniforms).to(logits.device)[:, None]) * cumulated[:, -1:]
        # Beyond the last token there are only NaN, for which the log-probability is NaN as well.
        tokens = torch.searchsorted(cumulated, wanted).squeeze(1).clamp(max=logits.shape[-1] - 1)
    log_probs = token_log_probs(logits, tokens, temperature)
    if not torch.isfinite(log_probs).all():
        raise NumericalTrouble("the model's logits are not finite, and no response can be sampled from them")
    return tokens, log_probs


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
