"""The memory plan of a configuration: peaks by phase and item, whether they fit on a card, and what would make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from transformers import PreTrainedConfig

from scaled.config import RunConfig
from scaled.errors import UserError
from scaled.memory.architecture import alike, architecture, with_layers
from scaled.memory.trace import PHASES, Sizes, Trace, trace

GIB = 2**30
RESERVED = 0.06  # of a card: CUDA's context, NCCL's and cuBLAS's buffers, gaps of the allocator; an assumption
TRACED = (4, 5)  # layers; with four the first two and the last two are told apart
PROMPT = 128  # tokens
WORTH = 0.99  # a change is proposed if the peak falls below so much of it
Items = dict[str, float]


@dataclass(frozen=True)
class Plan:
    """Bytes a GPU: for each phase the items at its highest moment."""

    phases: dict[str, Items]

    @property
    def highest(self) -> str:
        """The phase with the peak."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak(self) -> float:
        return sum(self.phases[self.highest].values())

    def fits(self, card: float) -> bool:
        """Whether the peak leaves free what a card of so many bytes needs for itself."""
        return self.peak <= card * (1 - RESERVED)


@dataclass(frozen=True)
class Change:
    """A setting that lowers the peak, what it costs, and the peak with it and all changes before it."""

    override: str
    costs: str
    peak: float


def plan_memory(config: RunConfig, *, prompt: int = PROMPT, whole: bool = False) -> Plan:
    """Trace one update of a configuration at full length of prompt and response.

    A model with many equal layers is traced with four and with five of them: at each moment of an update every item
    grows by the same bytes with each layer more, so the rest follows. ``whole`` traces all of them instead.
    Raises ``UserError`` for a model whose shapes are not known, or that cannot be trained as configured.
    """
    settings = architecture(config.model.path)
    sizes = sizes_of(config, settings, prompt)
    return Plan(highest(peaks(config, settings, sizes, whole=whole)))


def peaks(
    config: RunConfig, settings: PreTrainedConfig, sizes: Sizes, *, whole: bool = False
) -> dict[tuple[str, str], Items]:
    """The items, in bytes, at the highest moment of each place of an update."""
    layers = settings.num_hidden_layers
    if whole or layers <= sum(TRACED) or not alike(settings):
        return dict(trace(config, settings, sizes).peaks)
    small, large = (trace(config, with_layers(settings, count), sizes) for count in TRACED)
    return extrapolated(small, large, layers)


def extrapolated(small: Trace, large: Trace, layers: int) -> dict[tuple[str, str], Items]:
    """The peaks of ``layers`` layers from those of four and of five.

    The layers between the first two and the last two lie between these, as all they hold is linear in their number.
    """
    few, more = TRACED
    found = {}
    for place, before in small.peaks.items():
        items = large.peaks[place]
        found[place] = {
            item: items.get(item, 0) + (items.get(item, 0) - before.get(item, 0)) * (layers - more) / (more - few)
            for item in items.keys() | before.keys()
        }
    return found


def sizes_of(config: RunConfig, settings: PreTrainedConfig, prompt: int) -> Sizes:
    """Tokens of a prompt and of the longest sequence. Raises ``UserError`` if no token is left for the response."""
    rollout = config.rollout
    limits = [
        rollout.context,
        config.longest,
        None if rollout.max_new_tokens is None else prompt + rollout.max_new_tokens,
        getattr(settings, "max_position_embeddings", None),
    ]
    longest = min(limit for limit in limits if limit is not None)
    if prompt >= longest:
        raise UserError(
            f"a prompt of {prompt} tokens leaves no room in {longest}; give --prompt-tokens less, or set "
            "rollout.context"
        )
    return Sizes(prompt, longest)


def cheapest_changes(config: RunConfig, before: Plan, card: float, *, prompt: int = PROMPT) -> list[Change]:
    """Settings that bring the peak down to a card, the cheapest first, each with those before it.

    The list ends with the one that makes it fit; where none does, the last peak is still too high.
    """
    found: list[Change] = []
    current, peak = config, before.peak
    for change in CHANGES:
        if (proposed := change(current)) is None:
            continue
        override, costs = proposed
        try:
            changed = _with(current, override)
        except ValidationError:  # a setting that another one excludes
            continue
        plan = plan_memory(changed, prompt=prompt)
        if plan.peak > WORTH * peak:
            continue
        current, peak = changed, plan.peak
        found.append(Change(" ".join(f"{key}={value}" for key, value in override.items()), costs, peak))
        if plan.fits(card):
            break
    return found


Proposed = tuple[dict[str, Any], str] | None


def _fewer_logits(config: RunConfig) -> Proposed:
    if config.model.logit_rows <= 128:
        return None
    return {"model.logit_rows": 128}, "nothing but smaller products at the output layer"


def _recompute(config: RunConfig) -> Proposed:
    if config.model.gradient_checkpointing:
        return None
    return {"model.gradient_checkpointing": "true"}, "a second forward pass in backward"


def _one_response(config: RunConfig) -> Proposed:
    return None if config.microbatch == 1 else ({"microbatch": 1}, "smaller products, more passes")


def _compute_bf16(config: RunConfig) -> Proposed:
    if config.model.compute_dtype == "bfloat16":
        return None
    return {"model.compute_dtype": "bfloat16"}, "rounding of products; weights stay fp32"


def _engines(config: RunConfig) -> Proposed:
    if config.rollout.backend == "vllm":
        return None
    sync = {} if config.method == "logra" else {"policy_sync": "full"}
    return {"rollout.backend": "vllm"} | sync, "engines on other GPUs that write the responses"


def _smaller_sketches(config: RunConfig) -> Proposed:
    if config.method != "logra" or config.logra.rank <= 64:
        return None
    return {"logra.rank": 64}, "a coarser gradient"


def _sketches(config: RunConfig) -> Proposed:
    return {"method": "logra"}, "another method: sketches instead of gradients and moments"


def _more_ranks(config: RunConfig) -> Proposed:
    return {"launch.ranks": 2 * config.launch.ranks}, "twice the GPUs"


CHANGES: tuple[Callable[[RunConfig], Proposed], ...] = (
    _fewer_logits,
    _recompute,
    _one_response,
    _compute_bf16,
    _engines,
    _smaller_sketches,
    _sketches,
    _more_ranks,
    _more_ranks,
    _more_ranks,
)


def _with(config: RunConfig, override: dict[str, Any]) -> RunConfig:
    settings = config.model_dump()
    for key, value in override.items():
        section, _, leaf = key.rpartition(".")
        (settings[section] if section else settings)[leaf] = value
    settings["engine"]["launched"] = ()
    return RunConfig.model_validate(settings)


def highest(places: dict[tuple[str, str], Items]) -> dict[str, Items]:
    """The highest place of each phase."""
    found = {}
    for phase in PHASES:
        here = [items for (name, _), items in places.items() if name == phase]
        found[phase] = max(here, key=lambda items: sum(items.values()))
    return found


def as_json(plan: Plan, card_gib: float, changes: list[Change]) -> dict[str, Any]:
    """The plan as JSON's types, in GiB."""
    gib = {
        phase: {item: round(size / GIB, 4) for item, size in sorted(items.items()) if size > 0}
        for phase, items in plan.phases.items()
    }
    return {
        "peak_gib_per_gpu": round(plan.peak / GIB, 4),
        "peak_phase": plan.highest,
        "phases": {phase: round(sum(items.values()) / GIB, 4) for phase, items in plan.phases.items()},
        "items": gib[plan.highest],
        "items_by_phase": gib,
        "card_gib": card_gib,
        "reserved_gib": round(card_gib * RESERVED, 4),
        "fits": plan.fits(card_gib * GIB),
        "changes": [{"set": c.override, "costs": c.costs, "peak_gib_per_gpu": round(c.peak / GIB, 4)} for c in changes],
    }
