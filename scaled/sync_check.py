"""``logra sync-check``: a real engine follows a trainer for some updates, by factors and by full weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from logra_ref import LoGRA, attach_sketches
from logra_ref.rl import token_log_probs
from logra_ref.sync import FactorMessage, nudge_ties_
from scaled.config import ModelConfig
from scaled.model import load_model
from scaled.policy_sync.client import EngineClient
from scaled.policy_sync.fingerprint import fingerprints
from scaled.policy_sync.message_file import Origin, joint_digest, message_path, write_message
from scaled.policy_sync.server import EngineSettings, engine

RUN, SEED, TOKENS = "sync-check", 7, 32
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
"""Of log-probabilities, engine against transformers: two programs' sums in other orders; bf16 has eight bits."""


@dataclass(frozen=True)
class Row:
    """One way to send an update: bytes and seconds of each, the worst of all of them for what must agree."""

    way: str
    updates: int
    sync_bytes: int
    seconds: float
    wrong_weights: int
    log_prob_difference: float


@dataclass
class Trainer:
    """A model that learns some random sequences by LoGRA with int8 factors."""

    model: PreTrainedModel
    optimizer: LoGRA
    sequences: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, folder: Path, rank: int, dtype: str, ratio: float) -> Trainer:
        model, _ = load_model(ModelConfig(path=str(folder), device="cpu"))
        sketches = attach_sketches(model, rank, seed=SEED)
        generator = torch.Generator().manual_seed(SEED)
        sequences = torch.randint(model.config.vocab_size, (2, TOKENS), generator=generator)
        trainer = cls(model, LoGRA(sketches, ratio, int8_factors=True), sequences, getattr(torch, dtype))
        trainer._nudge()
        return trainer

    def step(self) -> FactorMessage:
        """One update, merged here, and its message."""
        self.optimizer.zero_grad()
        logits = self.model(self.sequences).logits[:, :-1]
        (-token_log_probs(logits, self.sequences[:, 1:], 1.0).mean()).backward()
        message = FactorMessage.of(self.optimizer.propose(), 1.0, base_seed=SEED)
        self.optimizer.step()
        self._nudge()
        return message

    def fingerprints(self) -> dict[str, int]:
        """Of each weight as the engine should have it."""
        return fingerprints(self.model.named_parameters(), self.dtype)

    @torch.no_grad()
    def log_probs(self) -> Tensor:
        logits = self.model(self.sequences[:1]).logits[:, :-1]
        return token_log_probs(logits, self.sequences[:1, 1:], 1.0)[0]

    def _nudge(self) -> None:
        if self.dtype == torch.bfloat16:
            for weight in self.model.parameters():
                nudge_ties_(weight.data)


def sync_check(settings: EngineSettings, console: Console, *, rank: int, updates: int, ratio: float = 6e-5) -> bool:
    """Start an engine, send it updates both ways, print what each cost, and say whether it ended equal.

    Raises ``UserError`` if the engine cannot be started or refuses an update.
    """
    trainer = Trainer.of(settings.model, rank, settings.dtype, ratio)
    with (
        tempfile.TemporaryDirectory(prefix="logra-sync-") as folder,
        console.status("starting the engine") as status,
        engine(settings, lambda seconds: status.update(f"starting the engine, {seconds:.0f} s")) as client,
    ):
        rows = list(_rows(trainer, client, settings.model, Path(folder), updates, status.update))
    table = Table("way", "updates", "bytes a sync", "seconds", "weights that differ", "log-probabilities differ by")
    for row in rows:
        values = (row.updates, f"{row.sync_bytes:,}", f"{row.seconds:.2f}", row.wrong_weights)
        table.add_row(row.way, *map(str, values), f"{row.log_prob_difference:.1e}")
    console.print(table)
    *synced, stale = rows
    limit = TOLERANCE[settings.dtype]
    equal = all(row.wrong_weights == 0 and row.log_prob_difference < limit for row in synced)
    noticed = stale.wrong_weights > 0
    console.print(f"engine and trainer are {'equal, bit for bit' if equal else 'NOT equal'}; ", end="")
    console.print("an update that was not sent is noticed" if noticed else "an update that was not sent is NOT noticed")
    return equal and noticed


def _rows(
    trainer: Trainer, client: EngineClient, model: Path, folder: Path, updates: int, say: Callable[[str], None]
) -> Iterator[Row]:
    client.follow(RUN, folder)
    started = perf_counter()
    client.send_full(0, model, "0")
    size = sum(weight.numel() * 4 for weight in trainer.model.parameters())
    yield _compared("full", 1, size, perf_counter() - started, trainer, client)
    seconds, sent = 0.0, 0
    for update in range(1, updates + 1):
        say(f"update {update}/{updates}")
        message = trainer.step()
        started = perf_counter()
        digest = joint_digest([write_message(folder, message, Origin(RUN))])
        client.send_factors(update, digest, str(update))
        seconds += perf_counter() - started
        sent = message_path(folder, update, 0, 1).stat().st_size
    yield _compared("factors", updates, sent, seconds / updates, trainer, client)
    trainer.step()
    yield _compared("control: one more update, not sent", 1, 0, 0.0, trainer, client)


def _compared(way: str, updates: int, size: int, seconds: float, trainer: Trainer, client: EngineClient) -> Row:
    wrong = len(client.differing(trainer.fingerprints()))
    engines = torch.tensor(client.log_probs(trainer.sequences[0].tolist()))
    return Row(way, updates, size, seconds, wrong, float((engines - trainer.log_probs()).abs().max()))
