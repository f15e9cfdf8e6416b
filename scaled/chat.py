"""``logra chat``: questions from the keyboard or a pipe, each answered on its own."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

from scaled.checkpoint import latest_checkpoint, verify
from scaled.config import ModelConfig, RunConfig
from scaled.config_file import load_config
from scaled.errors import UserError
from scaled.model import computing, load_model, require_name
from scaled.records import Message, Problem
from scaled.rollout.hf import generate
from scaled.seeds import derive_seed

MAX_NEW_TOKENS = 256  # for questions that are not of the run's task
ARITHMETIC = re.compile(r"(?:what is)?\s*(\d+)\s*([+-])\s*(\d+)\s*[=?]*\s*", re.IGNORECASE)


def chat(name: str, temperature: float) -> None:
    """Answer the lines of stdin until an empty one, the end of the input or Ctrl-C.

    ``name`` is a run's folder, of which the last checkpoint is taken, or any model's folder or name.
    """
    if not math.isfinite(temperature):
        raise UserError(f"temperature {temperature} is not finite; 0 gives the likeliest answer, 1 samples")
    if sys.stdin is None:
        raise UserError("standard input is closed, and chat reads its questions there")
    source, config = find_model(name)
    model, tokenizer = load_model(source)
    sys.stdin.reconfigure(errors="replace")
    terminal = sys.stdin.isatty()
    if terminal:
        task = ", such as 7 + 5" if config and config.data.task == "arithmetic" else ""
        print(f"{source.path}: ask something{task}; an empty line ends it.")
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    most = min(MAX_NEW_TOKENS, context // 2) if context else MAX_NEW_TOKENS
    number = 0
    try:
        while line := input("> " if terminal else "").strip():
            number += 1
            messages = ask(line, config)
            of_task = config is not None and (config.data.task is None or len(messages) > 1)
            try:
                with computing(model, source):
                    (response,) = generate(
                        model,
                        tokenizer,
                        [Problem(id=f"line {number}", messages=messages, answer="")],
                        max_new_tokens=config.rollout.max_new_tokens if of_task else most,
                        context=config.rollout.context if of_task else None,
                        temperature=temperature,
                        seed=derive_seed(0, "chat", number),
                        stop=config.rollout.stop if of_task else (),
                    )
            except UserError as error:  # of this question alone
                print(f"error: {error}", file=sys.stderr, flush=True)
                continue
            begun = messages[-1]["content"] if len(messages) > 1 else ""
            # What a model writes may hold codes that would move the cursor.
            text = "".join(c if c.isprintable() or c == "\n" else " " for c in begun + response.text)
            print(text if not response.truncated else f"{text} …", flush=True)
    except (EOFError, KeyboardInterrupt):
        pass


def find_model(name: str) -> tuple[ModelConfig, RunConfig | None]:
    """The model of a run's last checkpoint and the run's configuration, or any other model and None."""
    require_name(name)
    run = Path(name)
    if not (run / "config.yaml").exists():
        return ModelConfig(path=name), None
    config, checkpoint = load_config(run), latest_checkpoint(run)
    if checkpoint is None:
        raise UserError(f"run {run} has no checkpoint yet; `logra chat {config.model.path}` asks the model before it")
    verify(checkpoint)
    return config.model.model_copy(update={"path": str(checkpoint / "model")}), config


def ask(line: str, config: RunConfig | None) -> tuple[Message, ...]:
    """A question as a chat; a sum in a run on sums as ``tasks.arithmetic`` puts it, with the answer begun."""
    if config and config.data.task == "arithmetic" and (found := ARITHMETIC.fullmatch(line)):
        sum_ = "{} {} {}".format(*found.groups())
        return {"role": "user", "content": f"What is {sum_}?"}, {"role": "assistant", "content": f"{sum_} ="}
    return ({"role": "user", "content": line},)
