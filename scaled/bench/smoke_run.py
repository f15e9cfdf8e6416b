"""Updates of one method on random weights and made-up batches: what ``gpu_smoke`` runs in a process of its own."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from logra_ref.update import FactoredUpdate
from scaled.build import build_method, policy_of, prepare_model
from scaled.config import RunConfig
from scaled.errors import NumericalTrouble
from scaled.gradients import accumulate_gradients, build_probe
from scaled.methods import Method, Step
from scaled.metrics import peak_bytes
from scaled.model import resolve_device
from scaled.policy import Policy
from scaled.probe import Probe
from scaled.progress import RunProgress
from scaled.ranks import ALONE, Ranks
from scaled.records import Problem, Response
from scaled.seeds import derive_seed

RESPONSES = 2
PHASES = ("train", "probe", "update")
SHAPES = {
    "1.5b": {
        "num_hidden_layers": 28,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
    },
    "tiny": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
}
RANKS = {"1.5b": 256, "tiny": 4}  # of sketches and of adapters; 256 is the paper's


@dataclass
class SmokeRun:
    """What ``scaled.gradients`` takes of a run."""

    config: RunConfig
    policy: Policy
    method: Method
    ranks: Ranks = ALONE
    tokenizer: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(pad_token_id=0))
    progress: RunProgress = field(default_factory=lambda: RunProgress(0, 0, shown=False))

    @property
    def model(self) -> PreTrainedModel:
        return self.policy.model

    def advance(self, count: int) -> None:
        """Nobody watches."""


class TimedProbe:
    """A probe that keeps its own seconds, with the device's queue empty at either end."""

    def __init__(self, probe: Probe, device: torch.device) -> None:
        self.policy, self.seconds = probe.policy, 0.0
        self._probe, self._device = probe, device

    def predict(self, update: FactoredUpdate) -> tuple[float, float]:
        return self._timed(partial(self._probe.predict, update))

    def record(self) -> None:
        self._timed(self._probe.record)

    def realised_kl(self) -> float:
        return self._timed(self._probe.realised_kl)

    def _timed(self, work: Callable[[], Any]) -> Any:
        started = clock(self._device)
        result = work()
        self.seconds += clock(self._device) - started
        return result


def clock(device: torch.device) -> float:
    """The time once the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


def settings(method: str, shape: str, updates: int, device: str) -> RunConfig:
    """The project's defaults, which are the paper's, at one response a microbatch and two for the probe."""
    return RunConfig.model_validate(
        {
            "run": "nowhere",  # nothing is written
            "updates": updates,
            "method": method,
            "model": {"path": "random", "compute_dtype": "bfloat16", "device": device},
            "data": {"task": "arithmetic"},
            "logra": {"rank": RANKS[shape]},
            "lora": {"rank": RANKS[shape]},
            "control": {"responses_per_rank": RESPONSES},
        }
    )


def open_smoke_run(config: RunConfig, shape: str) -> SmokeRun:
    """A policy with random weights, the same for every method, made on the device."""
    torch.manual_seed(config.seed)
    with torch.device(resolve_device(config.model.device)):
        model = AutoModelForCausalLM.from_config(
            Qwen2Config(**SHAPES[shape], tie_word_embeddings=True),
            dtype=torch.float32,
            attn_implementation=config.model.attention,
        )
    prepare_model(model, config)
    policy = policy_of(model, config)
    return SmokeRun(config, policy, build_method(policy, config, ALONE))


def made_up(vocabulary: int, tokens: int, seed: int) -> tuple[list[Response], Tensor]:
    """Sequences of ``tokens`` tokens, an eighth of them prompt, and their advantages.

    Tokens are drawn evenly, and have the log-probabilities of that; a model with random weights is not far from it.
    """
    generator = torch.Generator().manual_seed(seed)
    prompt = max(1, tokens // 8)
    responses = []
    for index in range(RESPONSES):
        ids = tuple(torch.randint(vocabulary, (tokens,), generator=generator).tolist())
        responses.append(
            Response(
                problem=Problem(id=f"{index}", messages=(), answer=""),
                prompt_ids=ids[:prompt],
                token_ids=ids[prompt:],
                log_probs=(-math.log(vocabulary),) * (tokens - prompt),
                text="",
                stop_reason="length",
            )
        )
    return responses, torch.randn(RESPONSES, generator=generator)


def take_update(run: SmokeRun, update: int, tokens: int) -> tuple[Step, dict[str, float]]:
    """One update on a batch of its own, and the seconds of its phases.

    Raises ``NumericalTrouble`` or ``FloatingPointError`` if a loss, a gradient or a KL is not finite.
    """
    device = run.model.device
    seed = derive_seed(run.config.seed, "smoke", update)
    responses, advantages = made_up(run.model.config.vocab_size, tokens, seed)
    started = clock(device)
    accumulate_gradients(run, responses, advantages.to(device))
    trained = clock(device)
    probe = TimedProbe(build_probe(run, responses, update), device)
    step = run.method.step(update, probe, None, lambda: None)
    stepped = clock(device)
    if not math.isfinite(step.realised_kl):
        raise NumericalTrouble(f"the realised KL of update {update} is {step.realised_kl}")
    seconds = {"train": trained - started, "probe": probe.seconds, "update": stepped - trained - probe.seconds}
    return step, seconds


def measure(config: RunConfig, shape: str, tokens: int) -> dict[str, Any]:
    """Take the updates of one method; ``trouble`` says what stopped them, if anything did."""
    steps, seconds, trouble = [], [], None
    device = resolve_device(config.model.device)
    try:
        run = open_smoke_run(config, shape)
        for update in range(1, config.updates + 1):
            step, taken = take_update(run, update, tokens)
            steps.append(step)
            seconds.append(taken)
    except (NumericalTrouble, FloatingPointError, torch.OutOfMemoryError) as error:
        trouble = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    measured = seconds[1:] or seconds  # the first also makes the moments and warms up
    return {
        "updates": len(steps),
        "seconds": {phase: statistics.median(row[phase] for row in measured) for phase in PHASES if measured},
        "seconds_first": seconds[0] if seconds else {},
        "peak_bytes": peak_bytes(device),
        "alpha": [step.alpha for step in steps],
        "predicted_kl": [step.predicted_kl for step in steps],
        "realised_kl": [step.realised_kl for step in steps],
        "finite": trouble is None,
        "trouble": trouble,
    }
