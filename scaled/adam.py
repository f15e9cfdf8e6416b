"""Adam, for comparison: on dense gradients (the paper's baseline), or on LoRA adapters by peft."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Annotated, Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from logra_ref.sketch import select_layers
from logra_ref.step_size import cosine_budget
from scaled.config import RunConfig
from scaled.methods import Step
from scaled.probe import Probe
from scaled.ranks import Ranks
from scaled.section import MOST_COUNTED, Numbers
from scaled.seeds import derive_seed
from scaled.sharding import gathered, reshard, whole

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamNumbers(Numbers):
    """What ``AdamMethod.numbers`` gives: the count of its steps, as torch keeps it."""

    step: Annotated[float, Field(ge=0, le=MOST_COUNTED, multiple_of=1, allow_inf_nan=False)]


class AdamMethod:
    """Adam on what ``requires_grad``. It predicts no KL; the realised one is measured alike."""

    message = None  # engines get all weights

    def __init__(self, model: PreTrainedModel, ranks: Ranks, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.ranks, self.optimizer = model, ranks, optimizer
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def learning_rate(self, update: int) -> float:
        raise NotImplementedError

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self, update: int, probe: Probe, mismatch: float | None, commit: Callable[[], None]) -> Step:
        gradients = (p.grad for p in self.parameters.values() if p.grad is not None)
        bad = not all(torch.isfinite(self.ranks.own(gradient)).all() for gradient in gradients)
        if self.ranks.any(bad):
            raise FloatingPointError("a gradient is not finite; nothing was changed")
        started = perf_counter()
        probe.record()
        recorded = perf_counter()
        self.optimizer.param_groups[0]["lr"] = self.learning_rate(update)
        commit()
        reshard(probe.policy)
        self.optimizer.step()
        stepped = perf_counter()
        realised = probe.realised_kl()
        return Step(
            realised_kl=realised,
            seconds_probe=recorded - started + perf_counter() - stepped,
            seconds_update=stepped - recorded,
        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return gathered(self.model)

    def tensors(self) -> dict[str, Tensor]:
        found = {}
        for name, parameter in self.parameters.items():
            held = self.optimizer.state.get(parameter, {})
            for moment in MOMENTS:
                found[f"{name}.{moment}"] = held[moment] if moment in held else torch.zeros_like(parameter.detach())
        return found

    def numbers(self) -> dict[str, Any]:
        steps = {float(held["step"]) for held in self.optimizer.state.values()}
        return {"step": max(steps, default=0.0)}

    def load(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        step = AdamNumbers.read(numbers).step
        bad = (not torch.isfinite(self.ranks.own(tensor)).all() for tensor in tensors.values())
        if self.ranks.any(any(bad)):
            raise ValueError("a moment or an adapter is not finite")
        if step:
            for name, parameter in self.parameters.items():
                moments = {moment: tensors[f"{name}.{moment}"] for moment in MOMENTS}
                self.optimizer.state[parameter] = {"step": torch.tensor(step), **moments}

    def state_bytes(self) -> dict[str, int]:
        count = sum(self.ranks.own(p).numel() * p.element_size() for p in self.parameters.values())
        return {"gradients": count, "Adam's moments": 2 * count}


class DenseMethod(AdamMethod):
    """Adam on dense gradients: the paper's baseline."""

    @staticmethod
    def prepare(model: PreTrainedModel, config: RunConfig) -> None:
        """Let the configured weights ask for gradients, and no others."""
        if config.dense.parameters == "targets":
            model.requires_grad_(False)
            for layer in select_layers(model, config.logra.targets).values():
                layer.weight.requires_grad_(True)
        else:
            model.requires_grad_(True)

    def __init__(self, model: PreTrainedModel, config: RunConfig, ranks: Ranks) -> None:
        self.settings = config.dense
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(
            parameters, lr=self.settings.lr, betas=self.settings.betas, eps=self.settings.epsilon
        )
        super().__init__(model, ranks, optimizer)

    def learning_rate(self, update: int) -> float:
        """Linear warm-up, then the cosine that the KL budget follows too."""
        settings = self.settings
        if update <= settings.warmup:
            return settings.lr * update / settings.warmup
        return cosine_budget(
            update - settings.warmup,
            budget_max=settings.lr,
            budget_min=settings.lr_min,
            horizon=max(settings.horizon - settings.warmup, 1),
        )


class LoraMethod(AdamMethod):
    """AdamW on LoRA adapters of the selected layers, by peft; the weights themselves stay."""

    @staticmethod
    def prepare(model: PreTrainedModel, config: RunConfig) -> None:
        """Put adapters into the selected layers, drawn from the run's seed."""
        select_layers(model, config.logra.targets)  # the same refusals
        settings = config.lora
        adapters = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha if settings.alpha is not None else settings.rank,
            target_modules=list(config.logra.targets),
        )
        with torch.random.fork_rng():
            torch.manual_seed(derive_seed(config.seed, "lora"))
            inject_adapter_in_model(adapters, model)

    def __init__(self, model: PreTrainedModel, config: RunConfig, ranks: Ranks) -> None:
        self.settings = config.lora
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            parameters, lr=self.settings.lr, betas=self.settings.betas, eps=self.settings.epsilon, weight_decay=0.0
        )
        super().__init__(model, ranks, optimizer)

    def learning_rate(self, update: int) -> float:
        return self.settings.lr

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights with their adapters merged into them, by the names that they have without adapters."""
        layers = {f"{name}.": module for name, module in self.model.named_modules() if isinstance(module, LoraLayer)}
        for name, weight in gathered(self.model):
            owner, inner, leaf = name.rpartition("base_layer.")
            if not inner:
                if ".lora_" not in name:
                    yield name, weight
                continue
            if leaf == "weight":
                weight = weight + whole(layers[owner].get_delta_weight("default"))
            yield owner + leaf, weight

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | {name: parameter.detach() for name, parameter in self.parameters.items()}

    def state_bytes(self) -> dict[str, int]:
        others = super().state_bytes()
        return {"adapters": others["gradients"]} | others

    def load(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        super().load(tensors, numbers)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[name])
