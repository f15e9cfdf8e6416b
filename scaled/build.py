"""From a configuration to a policy and the method that trains it, in one process or over ranks."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from scaled.adam import DenseMethod, LoraMethod
from scaled.config import ModelConfig, RunConfig
from scaled.errors import UserError
from scaled.interrupt import StopRequest
from scaled.machine import require_memory
from scaled.methods import LograMethod, Method
from scaled.model import computing, load_model, load_skeleton, resolve_device, resolve_model
from scaled.policy import Policy
from scaled.ranks import ALONE, Ranks
from scaled.rollout import Rollout
from scaled.rollout.engines import FromEngines
from scaled.rollout.in_process import InProcess
from scaled.sharding import fill, shard

METHODS = {"logra": LograMethod, "dense": DenseMethod, "lora": LoraMethod}


def prepare_model(model: PreTrainedModel, config: RunConfig) -> None:
    """Choose what is trained. Layers that cannot be are a ``UserError``. The model may have no weights."""
    try:
        METHODS[config.method].prepare(model, config)
    except ValueError as error:
        raise UserError(f"{config.model.path} cannot be trained by {config.method}: {error}") from error


def build_policy(config: RunConfig, source: ModelConfig, ranks: Ranks) -> tuple[Policy, PreTrainedTokenizerBase]:
    """The policy with the weights of ``source``, ready to train, and its tokenizer.

    Over several ranks the first reads the model into host memory, and hands each its part.
    """
    device = resolve_device(config.model.device)
    whole = None
    with ranks.together():  # none waits for the first if its model cannot be loaded
        if ranks.first:
            if device.type == "cpu":  # which would kill the process, where a GPU has an error
                parameters, method = counted(config, source)
                needed = 4 * parameters + sum(method.state_bytes().values())
                require_memory(needed, f"training {source.path} by {config.method}")
            whole, tokenizer = load_model(source if ranks.world == 1 else source.model_copy(update={"device": "cpu"}))
            prepare_model(whole, config)
    model = whole
    if ranks.world > 1:
        model, tokenizer = load_skeleton(source)
        prepare_model(model, config)
    policy = policy_of(model, config)
    if ranks.world > 1:
        model.enable_input_require_grads()  # or FSDP would keep the first layer gathered until backward ends
        shard(policy, ranks, getattr(torch, config.model.compute_dtype))
        fill(policy, whole, device, ranks)
        policy.computing = nullcontext  # FSDP casts
    return policy, tokenizer


def counted(config: RunConfig, source: ModelConfig) -> tuple[int, Method]:
    """The number of a model's parameters, and its method on the meta device, to be counted too."""
    model, _ = load_skeleton(source)
    parameters = sum(parameter.numel() for parameter in model.parameters())  # before LoRA adds its own
    prepare_model(model, config)
    return parameters, build_method(Policy(model), config, ALONE)


def policy_of(model: PreTrainedModel, config: RunConfig) -> Policy:
    """A prepared model as a policy in training, with checkpointing if it is wanted."""
    head = model.get_output_embeddings()
    trains_head = any(p.requires_grad for p in head.parameters()) or "lm_head" in config.logra.targets
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return Policy(
        model,
        rows=config.model.logit_rows,
        trains_head=trains_head,
        computing=partial(computing, model, config.model),
    )


def build_method(policy: Policy, config: RunConfig, ranks: Ranks) -> Method:
    """The method of a configuration, for a model that was prepared for it."""
    return METHODS[config.method](policy.model, config, ranks)


def build_rollout(
    config: RunConfig,
    source: ModelConfig,
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    method: Method,
    ranks: Ranks,
    stop: StopRequest,
) -> Rollout:
    """Where responses come from, for a policy with the weights of ``source``."""
    if config.rollout.backend == "hf":
        return InProcess(policy.model, tokenizer, config, method.weights, ranks)
    if not config.engine_urls:
        raise UserError(
            "rollout.backend vllm needs engines: `logra launch` in place of `logra train` starts them, or name running "
            "ones, engine.urls=[http://127.0.0.1:8000]"
        )
    folder = Path(resolve_model(source.path))
    base = folder if config.method != "lora" and any(folder.glob("*.safetensors")) else None
    return FromEngines(policy.model, tokenizer, config, method, ranks, base, stop)
