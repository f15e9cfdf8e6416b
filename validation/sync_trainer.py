"""A trainer on a small policy, the engines that follow it, and how they compare: what C26 measures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from logra_ref import LoGRA, attach_sketches
from logra_ref.sync import FactorMessage, nudge_ties_, round_rows
from logra_ref.toy import ModularSum, ToyPolicy
from scaled.policy_sync.compare import bits16, equal_fraction, norm, went
from validation.claim import Setting
from validation.receivers import Bf16Engine, FusingEngine, NumpyReceiver, SplitEngine, WrappingEngine

UPDATE_RATIO = 6e-5  # the paper's ρ
RANK = 16


class Trainer:
    """A small policy that LoGRA trains to add, with a message for each update it takes.

    ``late``: the control that takes η from U and merges U, and rounds only what it sends.
    """

    def __init__(self, seed: int, *, late: bool = False) -> None:
        self.task, self.seed, self.late = ModularSum(10), seed, late
        self.model = ToyPolicy(self.task.vocabulary, seed=seed)
        self.sketches = attach_sketches(self.model, RANK, seed=seed)
        self.optimizer = LoGRA(self.sketches, UPDATE_RATIO, int8_factors=not late)
        self._nudge()

    def weights(self) -> dict[str, Tensor]:
        """A copy of the selected weights, fp32."""
        return {name: weight.detach().clone() for name, weight in self.sketches.weights().items()}

    def update(self, alpha: float) -> FactorMessage:
        """Take one update, on the cross-entropy of the answers to all prompts, and return its message."""
        prompts = self.task.all_prompts()
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(prompts)[:, -1], prompts[:, :2].sum(1) % self.task.modulus).backward()
        proposal = self.optimizer.propose()
        applied = dict(proposal.factors)
        if self.late:
            proposal.factors.update({name: round_rows(factor.direction()) for name, factor in applied.items()})
        message = FactorMessage.of(proposal, alpha, base_seed=self.seed)
        proposal.factors.update(applied)
        self.optimizer.step(alpha=alpha)
        self._nudge()
        return message

    def _nudge(self) -> None:
        for weight in self.sketches.weights().values():
            nudge_ties_(weight)


def follow(setting: Setting, updates: int, alpha: float = 1.0) -> dict[str, Any]:
    """Train, send every update to each engine, and compare their weights with the trainer's along the way.

    The trainer's bf16 weights are those of the numpy receiver: rounded on integers, from fp32 weights that it merged
    itself. Shares are of the way that the fp32 weights went, as in ``went``.
    """
    trainer = Trainer(setting.derived_seed("C26 trainer"))
    start = trainer.weights()
    exact, wrapping, fusing = SplitEngine(start), WrappingEngine(start), FusingEngine(start)
    engines = {
        "nearest": Bf16Engine(start, "naive"),
        "stochastic": Bf16Engine(start, "stochastic", setting.derived_seed("C26 stochastic")),
        "split": exact,
        "without nudge_ties_": wrapping,
    }
    oracle = NumpyReceiver(start)
    bf16_start = {name: weight.to(torch.bfloat16) for name, weight in start.items()}
    rows: list[dict[str, Any]] = []
    changed: list[float] = []
    before = oracle.bf16_bits()
    for number in setting.track(range(1, updates + 1), "C26 updates"):
        message = trainer.update(alpha)
        for receiver in (*engines.values(), fusing, oracle):
            receiver.receive(message)
        now = oracle.bf16_bits()
        changed.append(1 - equal_fraction(before, now))
        before = now
        if number == 1 or number % (updates // 20) == 0:
            weights = trainer.weights()
            row: dict[str, Any] = {"update": number}
            for name, engine in engines.items():
                held = engine.bf16()
                row[name] = {
                    "equal": equal_fraction(now, {key: bits16(weight) for key, weight in held.items()}),
                    "share": went(bf16_start, held, start, weights).share,
                }
            rows.append(row)
    return {
        "rows": rows,
        "changed": sum(changed) / updates,
        "moved": norm(start, weights) / norm(start),
        "split otherwise": different(weights, exact.joined()),
        "wrapping otherwise": different(weights, wrapping.joined()),
        "oracle otherwise": different(weights, oracle.weights()),
        "fusing otherwise": different(weights, fusing.weights),
        "entries": sum(weight.numel() for weight in start.values()),
    }


def rounded_late(setting: Setting, *, late: bool) -> int:
    """fp32 entries that an exact engine has otherwise than its trainer after an update, U rounded before or after η."""
    trainer = Trainer(setting.derived_seed("C26 late"), late=late)
    engine = SplitEngine(trainer.weights())
    engine.receive(trainer.update(0.7))
    return different(trainer.weights(), engine.joined())


def step_over_nominal(setting: Setting, alpha: float) -> float:
    """‖W_new − W_old‖ over α ρ ‖W_old‖, of all selected weights, for an update merged with its int8 factors."""
    trainer = Trainer(setting.derived_seed("C26 size"))
    before = trainer.weights()
    trainer.update(alpha)
    return norm(before, trainer.weights()) / (alpha * UPDATE_RATIO * norm(before))


def different(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> int:
    """How many fp32 entries do not have the same bits."""
    return sum(int((one[name].view(torch.int32) != other[name].view(torch.int32)).sum()) for name in one)
