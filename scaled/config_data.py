"""The settings of what goes into training: the model, problems, responses to them, and what these are worth."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import regex
from pydantic import Field, field_validator, model_validator

from scaled.section import Count, CountOrZero, Finite, LocalPath, Positive, Section, Temperature, Text

DEFAULT_MAX_NEW_TOKENS = 1024


class ModelConfig(Section):
    """The model and how it computes."""

    path: Text
    """A folder in Hugging Face format, a name on the hub, or `smollm2` (fetched and converted at first use)."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """The type of the forward and backward products. Weights are stored in fp32 in any case."""
    gradient_checkpointing: bool = True
    """Recompute activations in backward instead of keeping them."""
    logit_rows: Count = 1024
    """Positions whose logits exist at a time, each the vocabulary's size in fp32."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """The attention implementation of transformers. Both have the forward mode that the JVP probe needs."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """`cpu`, `cuda`, `cuda:1`, … ; `auto` takes the GPU if there is one."""


class DataConfig(Section):
    """Where problems come from: a task or a file."""

    task: Literal["arithmetic"] | None = None
    """A task that is generated: `arithmetic` is `x + y` and `x − y` for x, y < 20."""
    file: LocalPath | None = None
    """A jsonl file with `messages` and `answer` in each row."""
    held_out_file: LocalPath | None = None
    """The jsonl file for evaluation; without one, `held_out` rows are split off `file`."""
    held_out: CountOrZero = 256
    """Problems kept apart for evaluation."""

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if (self.task is None) == (self.file is None):
            raise ValueError("give one of `task` and `file`, and leave the other out or null")
        return self


class RolloutConfig(Section):
    """How responses are sampled."""

    backend: Literal["hf", "vllm"] = "hf"
    """In the trainer's process, by transformers; or by vLLM engines, which follow the trainer."""
    prompts: Count = 128
    """Problems in a batch."""
    responses_per_prompt: Count = 1
    """Responses to each problem."""
    max_new_tokens: Count | None = None
    """A response is cut after so many tokens (default 1024, or where `context` ends)."""
    context: Count | None = None
    """The most tokens of a prompt and its response together (the paper: 4,096)."""
    temperature: Temperature = 1.0
    """The sampling temperature, also that of the policy in loss and KL."""
    stop: tuple[Text, ...] = ()
    """Strings that end a response, beside the model's end of turn."""
    batch: Count = 64
    """Responses generated at once in the trainer's process."""

    @model_validator(mode="before")
    @classmethod
    def _default_limit(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("max_new_tokens") is None and data.get("context") is None:
            return data | {"max_new_tokens": DEFAULT_MAX_NEW_TOKENS}
        return data

    @property
    def limit(self) -> str:
        """How long a response may be, in words."""
        new, context = self.max_new_tokens, self.context
        return " and ".join(
            ([f"at most {new} tokens"] if new else []) + ([f"at most {context} with the prompt"] if context else [])
        )


class RewardConfig(Section):
    """Kept apart from the `reward` key, which names the function alone."""

    failure_reward: Finite = -0.01
    """The reward of a response that is wrong, or in which no answer can be found."""
    answer_pattern: str | None = None
    """A regular expression that a well-formed answer matches whole; its share is reported beside accuracy."""
    timeout: Positive = 10.0
    """Seconds that a verifier, or a reward function of your own, may take for one response."""
    memory: Positive = 2.0
    """GiB that a process which grades may map beyond what it has mapped after its imports."""

    @field_validator("answer_pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            regex.compile(pattern or "")
        except regex.error as error:
            raise ValueError(f"must be a regular expression: {error}") from None
        return pattern


class EvaluationConfig(Section):
    """When and how held-out problems are answered."""

    every: CountOrZero = 0
    """Evaluate after every so many updates (0: only before the first and after the last)."""
    samples: Count = 1
    """Sampled responses to each held-out problem (pass@1 is their mean, pass@k any of them)."""
    greedy: bool = True
    """Also one greedy response to each problem."""
    temperature: Temperature = 1.0
    """The temperature of the sampled responses."""
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    """Sample from the likeliest tokens that have so much of the probability. Training always samples from all."""
