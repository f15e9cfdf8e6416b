"""``logra sync-check``: a real engine follows a trainer for some updates, by factors and by full weights."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from logra_ref import LoGRA, attach_sketches
from logra_ref.rl import token_log_probs
from logra_ref.sketch import select_layers
from logra_ref.sync import FactorMessage, nudge_ties_
from scaled.config_data import ModelConfig
from scaled.machine import require_memory
from scaled.model import load_model
from scaled.policy_sync.client import EngineClient
from scaled.policy_sync.fingerprint import fingerprints
from scaled.policy_sync.outbox import Outbox
from scaled.policy_sync.server import EngineSettings, engine
from scaled.policy_sync.wire import Wiring
from scaled.ranks import ALONE

SEED, TOKENS = 7, 32
MEAN = {"float32": 1e-4, "bfloat16": 1.0}
"""Of log-probabilities, engine against transformers in fp32: two programs' sums in other orders. In bf16 a model of 30
layers is some tenths of a nat off, and an engine that has missed some updates nats."""
LARGEST = {"float32": 1e-3, "bfloat16": math.inf}
"""Single tokens that the model finds unlikely are further off: in bf16, with 2^16 times the rounding, by up to 8 nats
in transformers too."""


@dataclass(frozen=True)
class Row:
    """One way to send an update: bytes and seconds of each, the worst of all of them for what must agree."""

    way: str
    updates: int
    sync_bytes: int
    seconds: float
    wrong_weights: int
    largest_distance: float
    mean_distance: float


@dataclass
class Trainer:
    """A model that learns some random sequences by LoGRA with int8 factors."""

    model: PreTrainedModel
    optimizer: LoGRA
    sequences: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, folder: Path, rank: int, dtype: str, ratio: float, device: str = "cpu") -> Trainer:
        model, _ = load_model(ModelConfig(path=str(folder), device=device))
        rows = sum(layer.out_features for layer in select_layers(model).values())
        require_memory(4 * rank * rows, f"rank {rank:,} for {folder}")
        sketches = attach_sketches(model, rank, seed=SEED)
        generator = torch.Generator().manual_seed(SEED)
        sequences = torch.randint(model.config.vocab_size, (2, TOKENS), generator=generator).to(model.device)
        trainer = cls(model, LoGRA(sketches, ratio, int8_factors=True), sequences, getattr(torch, dtype))
        trainer._nudge()
        return trainer

    def step(self, alpha: float = 1.0) -> FactorMessage:
        """One update, merged here, and its message."""
        self.optimizer.zero_grad()
        logits = self.model(self.sequences).logits[:, :-1]
        (-token_log_probs(logits, self.sequences[:, 1:], 1.0).mean()).backward()
        message = FactorMessage.of(self.optimizer.propose(), alpha, base_seed=SEED)
        self.optimizer.step(alpha=alpha)
        self._nudge()
        return message

    def fingerprints(self) -> dict[str, int]:
        """Of each weight as the engine should have it."""
        return fingerprints(self.model.named_parameters(), self.dtype)

    @torch.no_grad()
    def log_probs(self) -> Tensor:
        logits = self.model(self.sequences[:1]).logits[:, :-1]
        return token_log_probs(logits, self.sequences[:1, 1:], 1.0)[0].cpu()

    def distances(self, client: EngineClient) -> Tensor:
        """How far log-probabilities are apart, engine and trainer, of the tokens of the first sequence."""
        return (torch.tensor(client.log_probs(self.sequences[0].tolist())) - self.log_probs()).abs()

    def _nudge(self) -> None:
        if self.dtype == torch.bfloat16:
            for weight in self.model.parameters():
                nudge_ties_(weight.data)


def sync_check(
    settings: EngineSettings,
    console: Console,
    *,
    engines: int = 1,
    rank: int,
    updates: int,
    transport: str = "folder",
    ratio: float = 6e-5,
) -> bool:
    """Start engines, send them updates both ways, print what each cost, and say whether they were equal after each.

    Sent by ``broadcast``, the trainer takes a GPU that engines have left, and then NCCL. Raises ``UserError`` if an
    engine cannot be started or refuses an update.
    """
    free = engines * settings.tensor_parallel
    on_gpu = transport == "broadcast" and torch.cuda.device_count() > free
    trainer = Trainer.of(settings.model, rank, settings.dtype, ratio, f"cuda:{free}" if on_gpu else "cpu")
    wiring = Wiring(None, settings.tensor_parallel, trainer.model.device) if transport == "broadcast" else None
    with (
        tempfile.TemporaryDirectory(prefix="logra-sync-") as folder,
        console.status("starting engines") as status,
        ExitStack() as stack,
    ):
        clients = []
        for number in range(engines):
            text = f"starting engine {number + 1} of {engines}"
            waiting = lambda seconds, text=text: status.update(f"{text}, {seconds:.0f} s")  # noqa: E731
            clients.append(stack.enter_context(engine(_of_number(settings, number), waiting, wiring)))
        outbox = Outbox(Path(folder), 0, settings.model, ALONE)
        rows = list(_rows(trainer, clients, outbox, updates, status.update))
    if wiring is not None:
        console.print(f"sent by broadcast, from {trainer.model.device} by {'NCCL' if on_gpu else 'gloo'}")
    table = Table("way", "updates", "bytes a sync", "seconds", "weights that differ", "log-prob. differ by", "mean")
    for row in rows:
        values = (row.updates, f"{row.sync_bytes:,}", f"{row.seconds:.2f}", row.wrong_weights)
        table.add_row(row.way, *map(str, values), f"{row.largest_distance:.1e}", f"{row.mean_distance:.1e}")
    console.print(table)
    *synced, stale = rows
    limit = LARGEST[settings.dtype]
    near = all(row.largest_distance < limit and row.mean_distance < MEAN[settings.dtype] for row in synced)
    equal = near and all(row.wrong_weights == 0 for row in synced)
    noticed = stale.wrong_weights > 0
    console.print(f"engine and trainer are {'equal, bit for bit' if equal else 'NOT equal'}; ", end="")
    console.print("an update that was not sent is noticed" if noticed else "an update that was not sent is NOT noticed")
    return equal and noticed


def _of_number(settings: EngineSettings, number: int) -> EngineSettings:
    """One of several engines: with a log of its own and, where there are GPUs, the next of them."""
    if number == 0:
        return settings
    each = settings.tensor_parallel
    gpus = range(number * each, (number + 1) * each) if torch.cuda.is_available() else ()
    return replace(settings, log=settings.log.with_stem(f"{settings.log.stem}-{number}"), gpus=gpus)


def _rows(
    trainer: Trainer, clients: list[EngineClient], outbox: Outbox, updates: int, say: Callable[[str], None]
) -> Iterator[Row]:
    seconds = _brought_up(clients, outbox)
    size = sum(weight.numel() * 4 for weight in trainer.model.parameters())
    yield Row("full", 1, size, seconds, *_apart(trainer, clients))
    seconds, sent, worst = 0.0, 0, (0, 0.0, 0.0)
    for update in range(1, updates + 1):
        say(f"update {update}/{updates}")
        message = trainer.step()
        started = perf_counter()
        sent = outbox.add_factors(message)
        seconds += perf_counter() - started + _brought_up(clients, outbox)
        worst = tuple(map(max, worst, _apart(trainer, clients)))
    yield Row("factors", updates, sent, seconds / updates, *worst)
    trainer.step()
    yield Row("control: one more update, not sent", 1, 0, 0.0, *_apart(trainer, clients))


def _brought_up(clients: list[EngineClient], outbox: Outbox) -> float:
    """The seconds that it took, for one engine."""
    started = perf_counter()
    for client in clients:
        outbox.bring_up(client)
    return (perf_counter() - started) / len(clients)


def _apart(trainer: Trainer, clients: list[EngineClient]) -> tuple[int, float, float]:
    """Weights that have other bits, and the largest and mean distance of log-probabilities, of the worst engine."""
    wanted = trainer.fingerprints()
    wrong = max(len(client.differing(wanted)) for client in clients)
    distances = [trainer.distances(client) for client in clients]
    return wrong, max(float(some.max()) for some in distances), max(float(some.mean()) for some in distances)
