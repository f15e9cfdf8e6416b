"""One update of a configuration, traced without numbers by the code that trains: what lives when, and what for.

Every rank is alike, so one is traced, in a process group that answers for the others. Policy, method, probe, loss,
sharding and optimizer are those of ``logra train``; only what needs numbers is left out: the digest of projections,
the mean of the probe. Not traced but counted from shapes: keys and values of responses that are written in the
trainer's process, and the whole copy of the model that writes them on each of several ranks. Not counted at all:
CUDA's context, the buffers of NCCL and of cuBLAS, what the allocator loses by rounding and gaps.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, PreTrainedConfig

from logra_ref.rl import importance_weights
from logra_ref.update import FactoredUpdate
from scaled.attention import attention_in_chunks
from scaled.batching import Batch
from scaled.build import build_method, policy_of, prepare_model
from scaled.config import RunConfig
from scaled.gradients import policy_loss, response_log_probs
from scaled.memory.live import GATHERED, GRADIENTS, Label, LiveBytes, Place
from scaled.memory.without_numbers import no_masks, rates_laid_out_as_values, silent
from scaled.methods import Method
from scaled.model import evaluating
from scaled.policy import Policy
from scaled.policy_sync.fingerprint import fingerprints
from scaled.probe import PROBES, Probe
from scaled.ranks import ALONE, Ranks
from scaled.sharding import shard

PHASES = ("rollout", "forward", "backward", "update", "probe", "sync")
MICROBATCHES = 2  # the first without gradients of others, the second with; more are like the second


@dataclass(frozen=True)
class Sizes:
    """What of a run's sizes is no setting: the tokens of a prompt, and of the longest sequence."""

    prompt: int
    longest: int


@dataclass(frozen=True)
class Trace:
    """The items, in bytes, at the highest moment of each place."""

    peaks: dict[Place, dict[str, int]]


class AlikeRanks(Ranks):
    """Ranks that all have what this one has."""

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.world


class UncountedProbe(Probe):
    """The probe without the mean over responses, whose number depends on numbers; its phase is its own."""

    live: LiveBytes

    def predict(self, update: FactoredUpdate) -> tuple[float, float]:
        attention = attention_in_chunks(self.policy.model) if self.kind == "jvp" else nullcontext()
        with self.live.within("probe"), evaluating(self.policy.model), attention, rates_laid_out_as_values():
            PROBES[self.kind](update, self.blocks, self._run, temperature=self.temperature, readout=self.policy.readout)
        return 1.0, 0.0

    def record(self) -> None:
        with self.live.within("probe"):
            super().record()

    def realised_kl(self) -> float:
        with self.live.within("probe"):
            return super().realised_kl()


def trace(config: RunConfig, settings: PreTrainedConfig, sizes: Sizes) -> Trace:
    """One update with every response as long as it may be, of a method that has its moments from the update before."""
    tokens = sizes.longest - 1  # nothing is predicted from the last
    answered = sizes.longest - sizes.prompt
    with ExitStack() as stack:
        ranks = stack.enter_context(_ranks(config.launch.ranks))
        stack.enter_context(silent())
        stack.enter_context(no_masks())
        policy = _policy(config, settings, ranks)
        live = LiveBytes(_labels(config, settings, policy), answered)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(live)
        with live.items_as("weights"):
            policy.to_empty(device="cpu")
        if ranks.world == 1:
            policy.model.tie_weights()  # FSDP ties them itself
        with live.items_as("sketches" if config.method == "logra" else "moments"):
            method = build_method(policy, config, ranks)
        _as_on_a_gpu(method, config)
        with live.items_as("moments"):
            method.load(method.tensors(), method.numbers() | ({} if config.method == "logra" else {"step": 1.0}))
        _mark_layers(policy, live)
        if _in_process(config) and ranks.world > 1:
            live.add("rollout copy", 4 * sum(parameter.numel() for parameter in policy.parameters()))
        block = _block(config.microbatch, tokens, answered)
        for _ in range(min(MICROBATCHES, _microbatches(config))):
            with live.within("forward"):
                loss = _loss(policy, block, config)
            with live.within("backward"):
                loss.backward()
            del loss
        with live.within("update"):
            probe = UncountedProbe(
                policy,
                [_block(size, tokens, answered) for size in _probe_blocks(config, answered)],
                kind=config.control.probe,
                temperature=config.rollout.temperature,
                advance=lambda count: None,
                total=ranks.total,
            )
            probe.live = live
            method.step(2, probe, None, lambda: None)
        del probe
        gc.collect()
        with live.within("sync"):
            _sync(config, method)
        with live.within("rollout"):
            if _in_process(config):
                live.add("keys and values", _keys_and_values(config, settings, sizes))
        return Trace(dict(live.peaks))


@contextmanager
def _ranks(world: int) -> Iterator[Ranks]:
    """This process as rank 0 of ``world``, the others imagined."""
    if world == 1:
        yield ALONE
        return
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield AlikeRanks(init_device_mesh("cpu", (world,)))
    finally:
        dist.destroy_process_group()


def _policy(config: RunConfig, settings: PreTrainedConfig, ranks: Ranks) -> Policy:
    """As ``scaled.build.build_policy`` makes it, on the meta device."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            settings, dtype=torch.float32, attn_implementation=config.model.attention
        )
    prepare_model(model, config)
    policy = policy_of(model, config)
    if ranks.world > 1:
        model.enable_input_require_grads()
        shard(policy, ranks, getattr(torch, config.model.compute_dtype))
        policy.computing = nullcontext
    return policy


def _as_on_a_gpu(method: Method, config: RunConfig) -> None:
    """On a GPU torch's Adam goes over all parameters at once, with a temporary for each."""
    if config.method != "logra" and config.model.device != "cpu":
        method.optimizer.param_groups[0]["foreach"] = True


def _mark_layers(policy: Policy, live: LiveBytes) -> None:
    """Note which layer is under way: the first two and the last two by name, those between together."""
    kinds = policy.model._no_split_modules or ()
    layers = [module for module in policy.modules() if type(module).__name__.removeprefix("FSDP") in kinds]
    for index, layer in enumerate(layers):
        end = len(layers) - index
        part = f"layer {index + 1}" if index < 2 else f"layer -{end}" if end <= 2 else "layers between"
        layer.register_forward_pre_hook(lambda module, args, part=part: setattr(live, "part", part))


def _block(size: int, tokens: int, answered: int) -> Batch:
    """A microbatch of the longest sequences."""
    count = size * answered
    return Batch(
        input_ids=torch.zeros(size, tokens, dtype=torch.int64),
        predicts=torch.ones(size, tokens, dtype=torch.bool),
        targets=torch.zeros(count, dtype=torch.int64),
        rollout_log_probs=torch.zeros(count),
        response=torch.zeros(count, dtype=torch.int64),
        shared=0,
    )


def _loss(policy: Policy, block: Batch, config: RunConfig) -> Tensor:
    log_probs = response_log_probs(policy, block, config.rollout.temperature)
    weights = importance_weights(log_probs, block.rollout_log_probs, config.loss.importance_cap)
    lengths = torch.ones_like(block.targets)
    return policy_loss(config.loss, log_probs, torch.zeros_like(log_probs), weights, lengths, lengths)


def _microbatches(config: RunConfig) -> int:
    """Of one rank."""
    responses = config.rollout.prompts * config.rollout.responses_per_prompt
    return math.ceil(math.ceil(responses / config.launch.ranks) / config.microbatch)


def _probe_blocks(config: RunConfig, answered: int) -> list[int]:
    """Responses in each block of one rank: as ``scaled.gradients`` draws them and deals them out."""
    control = config.control
    ranks, size = config.launch.ranks, config.microbatch
    count = control.responses(ranks) or math.ceil(control.positions / answered)
    own = math.ceil(min(count, config.rollout.prompts * config.rollout.responses_per_prompt) / ranks)
    return [min(size, own - start) for start in range(0, own, size)]


def _in_process(config: RunConfig) -> bool:
    return config.rollout.backend == "hf"


def _sync(config: RunConfig, method: Method) -> None:
    """What is gathered for whoever writes responses: all weights one by one, or their fingerprints."""
    if not config.sends_factors:
        for _ in method.weights():
            pass
    elif config.engine.verify_every:
        fingerprints(method.weights(), getattr(torch, config.engine.dtype))


def _keys_and_values(config: RunConfig, settings: PreTrainedConfig, sizes: Sizes) -> int:
    """Bytes of the cache of one batch of responses at full length."""
    responses = config.rollout.prompts * config.rollout.responses_per_prompt
    batch = min(config.rollout.batch, math.ceil(responses / config.launch.ranks))
    width = getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
    heads = getattr(settings, "num_key_value_heads", None) or settings.num_attention_heads
    number = getattr(torch, config.model.compute_dtype).itemsize
    return 2 * settings.num_hidden_layers * heads * width * sizes.longest * batch * number


def _labels(config: RunConfig, settings: PreTrainedConfig, policy: Policy) -> Label:
    """What a new tensor is for, by its shape and the phase."""
    trained = {weight.shape for weight in policy.parameters() if weight.ndim == 2}
    vocabulary, rank = settings.vocab_size, config.logra.rank if config.method == "logra" else None
    plain = {"forward": "activations", "backward": "activations", "probe": "probe", "sync": GATHERED}
    plain["update"] = "directions" if config.method == "logra" else "moments"

    def label(tensor: Tensor, phase: str) -> str:
        shape = tensor.shape
        if len(shape) >= 2 and shape[-1] == vocabulary:
            return "logits"
        if len(shape) == 2 and shape[1] == rank:
            return "directions" if phase in ("update", "probe") else "sketches"
        if len(shape) in (2, 3) and shape[0] == rank:
            return "projections"
        if shape in trained and phase in ("forward", "backward"):
            return GRADIENTS if phase == "backward" else GATHERED
        return plain.get(phase, "activations")

    return label
