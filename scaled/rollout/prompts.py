"""From a problem to the tokens that a model is asked with, and from its tokens to a response's text."""

from __future__ import annotations

from collections.abc import Sequence

import jinja2
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from scaled.errors import UserError
from scaled.records import Problem

Prompt = tuple[int, ...]
SHOWN = 10  # prompts that are too long


def encode_prompts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    max_new_tokens: int | None,
    context: int | None = None,
    longest: int | None = None,
) -> list[Prompt]:
    """The tokens of each problem's chat.

    Raises ``UserError`` that names those which leave no room for their responses: in ``context``, in the model's or in
    the ``longest`` that an engine takes.
    """
    prompts = [encode_prompt(tokenizer, problem) for problem in problems]
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    whose = "the model's context"
    if longest is not None and (most is None or longest < most):
        most, whose = longest, "engine.max_model_len"
    if context is not None and most is not None and context > most:
        raise UserError(f"rollout.context = {context} is more than {whose} of {most}; set it to {most} at most")
    found = [
        (problem.id, _too_long(len(prompt), max_new_tokens, context, most, whose))
        for problem, prompt in zip(problems, prompts, strict=True)
    ]
    if wrong := [f"problem {name}: {reason}" for name, reason in found if reason]:
        more = [f"… and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
        raise UserError("\n  ".join([*wrong[:SHOWN], *more]))
    return prompts


def _too_long(length: int, max_new_tokens: int | None, context: int | None, most: int | None, whose: str) -> str | None:
    """Why a prompt of so many tokens leaves no room for its response, and the remedy; None if it does."""
    if context is not None:
        if length < context:
            return None
        return (
            f"its prompt of {length} tokens leaves no room in rollout.context = {context}; leave it out, or raise that"
        )
    if most is None or length + max_new_tokens <= most:
        return None
    room = most - length
    return (
        f"its prompt of {length} tokens and max_new_tokens = {max_new_tokens} make more than {whose} of {most}; leave "
        "it out" + (f", or set rollout.max_new_tokens to {room} at most" if room > 0 else "")
    )


def room_after(prompt: Prompt, max_new_tokens: int | None, context: int | None) -> int:
    """The most tokens of the response to a prompt. One of the two limits is there."""
    return min(limit for limit in (max_new_tokens, context and context - len(prompt)) if limit is not None)


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


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token by which the chat template ends an answer, if it does.

    A base model such as Qwen2.5-Math has an end of text (`<|endoftext|>`) as its end of sequence, and ends its answers
    as the template does (`<|im_end|>`): without it such a model would go on with the user's next turn.
    """
    answer = "an answer"
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "a question"}, {"role": "assistant", "content": answer}], tokenize=False
        )
    except (jinja2.TemplateError, ValueError):
        return None
    _, found, after = text.rpartition(answer)
    following = tokenizer(after, add_special_tokens=False)["input_ids"][:1] if found and after else []
    return next(
        (token for token in following if getattr(tokenizer.added_tokens_decoder.get(token), "special", False)), None
    )


class EndOfResponse:
    """What ends a response, and the text that is left of it: the semantics of vLLM."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        ids = model.generation_config.eos_token_id
        self.ids = {tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [ids]), end_of_turn(tokenizer)} - {None}
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
