"""The methods that a training step is measured for, each made ready on a model of its own.

A model is a real one, or one decoder layer with random weights of an architecture that is shipped without weights.
LoGRA, dense Adam and LoRA are those of ``logra train``. GaLore and APOLLO are their authors' packages, at the settings
that their READMEs give, on the same matrices as dense Adam. ``frozen`` trains nothing: forward, and backward to the
first matrices' outputs, are what every method has to do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from scaled.bench.smoke_run import SmokeRun
from scaled.build import build_method, policy_of, prepare_model
from scaled.config import RunConfig
from scaled.memory.architecture import architecture, shipped, with_layers
from scaled.model import load_model
from scaled.ranks import ALONE

PEERS = {"galore": "galore_torch", "apollo": "apollo_torch"}  # and the packages that they are in
RANKED = ("logra", "logra-sgd", "lora", *PEERS)
LEARNING_RATE = 1e-6
VOCABULARY = 1024  # the real one would be most of a single layer's step


@dataclass
class Contender:
    """A model with a method: ``run`` is what gradients are accumulated in, ``update`` what is done with them."""

    run: SmokeRun
    update: Callable[[], Any]


@dataclass
class _Bare:
    """What ``accumulate_gradients`` takes of a method."""

    zero_grad: Callable[[], Any]


def settings(name: str, model: str, *, checkpointing: bool) -> RunConfig:
    """The configuration of a contender, ``method`` or ``method:rank``: the project's defaults, which are the paper's,
    in fp32, with both sequences of a batch at once."""
    method, _, rank = name.partition(":")
    ours = {"logra-sgd": "logra"}.get(method, method if method in ("logra", "lora") else "dense")
    sketches = {"direction": "sgd" if method == "logra-sgd" else "row_adam"}
    return RunConfig.model_validate(
        {
            "run": "nowhere",  # nothing is written
            "updates": 1,
            "method": ours,
            "model": {"path": model, "device": "cpu", "gradient_checkpointing": checkpointing},
            "data": {"task": "arithmetic"},
            "microbatch": 2,
            "logra": sketches | ({"rank": int(rank)} if ours == "logra" else {}),
            "lora": {"rank": int(rank)} if ours == "lora" else {},
        }
    )


def open_contender(name: str, model: str, *, checkpointing: bool) -> Contender:
    """Load the model and make it ready for a method. Raises ``UserError`` for a model that cannot be trained."""
    config = settings(name, model, checkpointing=checkpointing)
    method, _, rank = name.partition(":")
    loaded = one_layer(model) if model in shipped() else load_model(config.model)[0]
    if method == "frozen":
        loaded.requires_grad_(False)
        for module in loaded.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(_wanted)
        run = SmokeRun(config, policy_of(loaded, config), _Bare(lambda: None))
        return Contender(run, lambda: None)
    prepare_model(loaded, config)
    policy = policy_of(loaded, config)
    if method in PEERS:
        optimizer = _peer(method, int(rank), loaded)
        return Contender(SmokeRun(config, policy, _Bare(optimizer.zero_grad)), optimizer.step)
    trained = build_method(policy, config, ALONE)
    return Contender(SmokeRun(config, policy, trained), trained.optimizer.step)


def one_layer(name: str) -> PreTrainedModel:
    """One decoder layer of a shipped architecture, between a small embedding and output layer."""
    settings = with_layers(architecture(name), 1)
    settings.vocab_size = VOCABULARY
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(settings, dtype=torch.float32)


def _wanted(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    if not output.requires_grad:
        output.requires_grad_()


def _peer(name: str, rank: int, model: PreTrainedModel) -> torch.optim.Optimizer:
    """A peer's optimizer with its documented settings."""
    group: dict[str, Any] = {"params": [parameter for parameter in model.parameters() if parameter.requires_grad]}
    group |= {"rank": rank, "update_proj_gap": 200, "proj_type": "std"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about 8-bit kernels and a deprecation
        if name == "galore":
            from galore_torch import GaLoreAdamW

            return GaLoreAdamW([group | {"scale": 0.25}], lr=LEARNING_RATE, no_deprecation_warning=True)
        from apollo_torch import APOLLOAdamW

        group |= {"proj": "random", "scale_type": "channel", "scale": 1}
        return APOLLOAdamW([group], lr=LEARNING_RATE)
