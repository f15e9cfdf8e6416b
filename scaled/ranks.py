"""The processes of a run: how many there are, and what they tell each other.

``torchrun --nproc-per-node N -m scaled train CONFIG`` starts N of them, one a GPU, or gloo ranks on a CPU. A plain
``logra train`` is one, to which everything here is the identity.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from scaled.errors import NumericalTrouble, UserError

Value = TypeVar("Value")

PATIENCE = timedelta(minutes=60)  # the longest that one rank may work alone, at its rollout or its checkpoint
PR_SET_PDEATHSIG = 1
LEAVING = 10.0  # seconds that a rank which is done waits for the others to be
GATHERING = timedelta(seconds=45)  # in which all ranks must have been started


class Ranks:
    """One process, or the members of torch's process group. Every rank has to make the same calls in the same order."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self.mesh = mesh
        self.rank, self.world = (0, 1) if mesh is None else (dist.get_rank(), dist.get_world_size())

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes and shows."""
        return self.rank == 0

    def gather(self, value: Value) -> list[Value]:
        """Everyone's value, in the order of ranks."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def share(self, items: Sequence[Value]) -> list[Value]:
        """This rank's part of what all ranks have: every so many, from its own number on."""
        return list(items[self.rank :: self.world])

    def total(self, x: Tensor) -> Tensor:
        """The sum of a tensor over all ranks."""
        if self.world == 1:
            return x
        x = x.clone()
        dist.all_reduce(x)
        return x

    def spread(self, rows: Tensor, count: int) -> Tensor:
        """This rank's rows of a vector of ``count`` as part of the whole, for a checkpoint to write and read."""
        if self.mesh is None:
            return rows
        return DTensor.from_local(rows, self.mesh, [Shard(0)], run_check=False, shape=(count,), stride=(1,))

    def own(self, x: Tensor) -> Tensor:
        """The reverse: this rank's rows."""
        return x.to_local() if isinstance(x, DTensor) else x

    def any(self, flag: bool) -> bool:
        """Whether it is true of any rank."""
        return any(self.gather(flag))

    def on_first(self, work: Callable[[], Value]) -> Value:
        """Do what only one should, and give its result, or its ``UserError``, to all."""
        result: Any = None
        with self.together():
            if self.first:
                result = work()
        return self.gather(result)[0]

    @contextmanager
    def together(self) -> Iterator[None]:
        """What goes wrong inside for one rank goes wrong for all, so that none waits for it.

        Nothing inside may itself wait for another rank. A rank whose own work went well raises the first error of
        the others, with the same class if it is one of ours.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            if self.world == 1:
                raise
            error = raised
        if self.world == 1:
            return
        kind = next((kind for kind in ERRORS if isinstance(error, kind)), None)
        failures = self.gather(None if error is None else (kind and kind.__name__, f"{error}"))
        if error is not None:
            raise error
        for rank, failure in enumerate(failures):
            if failure is not None:
                raised_as = next((kind for kind in ERRORS if kind.__name__ == failure[0]), RuntimeError)
                raise raised_as(f"rank {rank}: {failure[1]}")


ALONE = Ranks()
ERRORS: tuple[type[Exception], ...] = (UserError, NumericalTrouble, FloatingPointError, OSError)


@contextmanager
def joined_ranks(device: torch.device, ask_to_stop: Callable[[], None] = lambda: None) -> Iterator[Ranks]:
    """The ranks that ``torchrun`` started, or the one process there is. Raises ``UserError`` if they do not gather.

    Inside, a peer that is gone is a ``UserError`` instead of torch's own error, which is about sockets; SIGTERM calls
    ``ask_to_stop``.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield Ranks()
        return
    rank, world = _place()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # torchrun ends the others by this signal when one is gone; they shall say first why they end. What takes longer
    # than half a minute torchrun kills.
    signal.signal(signal.SIGTERM, lambda number, frame: ask_to_stop())
    _end_with_torchrun()
    store = _gathered(rank, world)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=PATIENCE,
    )
    try:
        yield Ranks(init_device_mesh(device.type, (world,)))
        _leave(store, world)
    except (dist.DistError, RuntimeError) as error:
        if not lost(error):
            raise
        raise UserError(
            f"rank {rank} lost another rank ({str(error).splitlines()[0][:200]}). Its own message says why. A "
            "checkpoint is whole if there is one: start all ranks again with --resume"
        ) from error
    finally:
        dist.destroy_process_group()


def _end_with_torchrun() -> None:
    """Have the kernel send SIGTERM when torchrun is killed: its ranks are in sessions of their own, and would stay."""
    with suppress(AttributeError, OSError):  # on Linux alone
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _leave(store: dist.Store, world: int) -> None:
    """Wait until all have come to the end: a rank that closes its connections may cut off one that still reads."""
    with suppress(dist.DistError, RuntimeError):  # the store goes with the rank that has it, and that one waits too
        count, until = store.add("leaving", 1), time.monotonic() + LEAVING
        while count < world and time.monotonic() < until:
            time.sleep(0.05)
            count = store.add("leaving", 0)


def _place() -> tuple[int, int]:
    """This rank and how many there are, as torchrun's variables say."""
    found = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    numbers = {name: int(text) if text.isdecimal() else -1 for name, text in found.items()}
    rank, world = numbers["RANK"], numbers["WORLD_SIZE"]
    if not (0 <= rank < world and 0 < numbers["MASTER_PORT"] < 2**16 and os.environ.get("MASTER_ADDR")):
        said = ", ".join(f"{name}={text!r}" for name, text in found.items())
        raise UserError(
            f"{said}, MASTER_ADDR={os.environ.get('MASTER_ADDR', '')!r} are no place among ranks: start them by "
            "torchrun, which sets all four, or unset WORLD_SIZE for a single process"
        )
    return rank, world


def _gathered(rank: int, world: int) -> dist.Store:
    """The store of all ranks, once each of them is there."""
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        return next(dist.rendezvous("env://", rank, world, timeout=GATHERING))[0]
    except (RuntimeError, OSError) as error:
        raise UserError(
            f"rank {rank} of {world} waited in vain for the others at {address} ({str(error).splitlines()[0][:200]}). "
            "Start all ranks at the same time, with one MASTER_ADDR and a MASTER_PORT that is free"
        ) from error


def lost(error: BaseException) -> bool:
    """Whether an error is torch's way to say that another rank is gone."""
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in GONE)


GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed", "Timed out waiting")
