"""``logra bench rounding``: what becomes of the same updates in a real bf16 engine, by each way to hold its weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from scaled.engine.weights import ROUNDINGS, Form, Rounding
from scaled.policy_sync.client import EngineClient
from scaled.policy_sync.compare import Went, bits16, equal_fraction, norm, went
from scaled.policy_sync.export import read_export
from scaled.policy_sync.message_file import message_path
from scaled.policy_sync.outbox import Outbox
from scaled.policy_sync.server import EngineSettings, engine
from scaled.ranks import ALONE
from scaled.sync_check import Trainer

DTYPE, RATIO = "bfloat16", 6e-5  # the paper's ρ


@dataclass(frozen=True)
class Row:
    """An engine beside its trainer after some updates: the share of bf16 entries of the trained matrices that are
    equal, how far it went along, log-probabilities. ``moved`` is how far the trainer went, over its weights' size."""

    rounding: Rounding
    equal: float
    went: Went
    log_prob_difference: float
    seconds: float
    moved: float


def bench_rounding(settings: EngineSettings, console: Console, *, rank: int, updates: int) -> bool:
    """Start a bf16 engine and print a row for each rounding; whether ``exact`` is equal in every entry and ``naive``,
    the control, is not.

    Raises ``UserError`` if the engine cannot be started or refuses an update.
    """
    with (
        tempfile.TemporaryDirectory(prefix="logra-rounding-") as folder,
        console.status("starting an engine") as status,
        engine(settings, lambda seconds: status.update(f"starting an engine, {seconds:.0f} s")) as client,
    ):
        rows = [
            follow(client, settings.model, rounding, Path(folder), rank=rank, updates=updates, say=status.update)
            for rounding in ROUNDINGS
        ]
    table = Table("rounding", "entries equal", "of the way", "off by", "log-prob. gap", "seconds")
    for row in rows:
        shares = (f"{share:.2%}" for share in (row.equal, row.went.share, row.went.error))
        table.add_row(row.rounding, *shares, f"{row.log_prob_difference:.1e}", f"{row.seconds:.3f}")
    console.print(table)
    console.print(
        f"{updates} updates of {settings.model}, r = {rank}, moved the trained weights by {rows[0].moved:.2%} of their "
        "size. Off by: what is not the trainer's way, over that way. The engine computes in bf16 and the trainer in "
        "fp32, so exact's own gap and what it is off by are of bf16 itself. Seconds: of a sync."
    )
    equal = {row.rounding: row.equal == 1 for row in rows}
    exact, naive = equal["exact"], equal["naive"]
    console.print(f"exact: {'every entry is' if exact else 'NOT every entry is'} bf16 of the trainer's; ", end="")
    console.print("naive: some are not" if not naive else "naive: NO entry differs, so nothing is shown")
    return exact and not naive


def follow(
    client: EngineClient,
    model: Path,
    rounding: Rounding,
    folder: Path,
    *,
    rank: int,
    updates: int,
    say: Callable[[str], None],
) -> Row:
    """Send the updates of a trainer, the same for every rounding, after whole weights, and compare at the end.

    Raises ``UserError`` as the engine does.
    """
    trainer = Trainer.of(model, rank, DTYPE, RATIO)
    weights = trainer.optimizer.sketches.weights()
    outbox = Outbox(folder, 0, model, ALONE, Form(rounding))
    outbox.bring_up(client)
    before, engine_before = {name: weight.detach().clone() for name, weight in weights.items()}, _held(client, weights)
    seconds = 0.0
    for update in range(1, updates + 1):
        say(f"{rounding}: update {update}/{updates}")
        message = trainer.step()
        started = perf_counter()
        outbox.add_factors(message)
        outbox.bring_up(client)
        seconds += perf_counter() - started
        message_path(outbox.folder, update, 0, 1).unlink()  # hundreds would fill the disk, and no engine comes back
    after, engine_after = {name: weight.detach() for name, weight in weights.items()}, _held(client, weights)
    wanted = {name: bits16(weight.to(torch.bfloat16)) for name, weight in after.items()}
    return Row(
        rounding,
        equal_fraction(wanted, {name: bits16(weight) for name, weight in engine_after.items()}),
        went(engine_before, engine_after, before, after),
        float(trainer.distances(client).max()),
        seconds / updates,
        norm(before, after) / norm(before),
    )


def _held(client: EngineClient, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the engine has of these weights."""
    with tempfile.TemporaryDirectory(prefix="logra-export-") as folder:
        return read_export(client.export(Path(folder)), {name: tuple(w.shape) for name, w in weights.items()})
