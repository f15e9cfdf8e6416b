"""Files from the trainer straight to an engine's workers, where they share no folder: by NCCL, or by gloo on a CPU.

Each engine has a group of its own with the trainer's rank it belongs to, which is member 0; the workers follow. So an
engine that is lost takes no other along, and one that is back gets a new group. The groups are no part of torch's own.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from scaled.background import in_background
from scaled.errors import UserError

CHUNK = 2**26  # bytes that are sent at a time
COME = "come"
MEETING = timedelta(seconds=120)  # in which all members must have come
VISIT = timedelta(seconds=60)  # less: that an engine does not find its trainer is told by the engine
DONE = timedelta(seconds=10)  # to look at how work has ended that has


class WireBroken(RuntimeError):
    """The other side is gone, or has given up. Nothing more can be sent on this wire."""


@dataclass(frozen=True)
class Wiring:
    """How a trainer reaches an engine of so many workers: at which of its own addresses, from which device.

    ``host`` may be None for the address by which it reaches the engine.
    """

    host: str | None
    workers: int
    device: torch.device


@dataclass(frozen=True)
class Meeting:
    """Where an engine's workers find the trainer."""

    host: str
    port: int
    workers: int
    backend: Literal["gloo", "nccl"]


class Wire:
    """A group of the trainer, member 0, and an engine's workers. All send and receive the same files in one order."""

    def __init__(
        self,
        meeting: Meeting,
        member: int,
        store: dist.Store,
        device: torch.device,
        patience: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Returns once all members are there. ``check`` is called meanwhile, and may raise.

        Raises ``UserError`` if they are not there in time.
        """
        self.device, self.store = device, store
        until = time.monotonic() + MEETING.total_seconds()
        # Both libraries wait for the others without a look at anything else: NCCL for as long as it takes.
        joining = in_background(lambda: _join(meeting, member, store, device, patience))
        try:
            while not joining.done():
                check()
                if time.monotonic() > until:
                    raise RuntimeError(f"not in {MEETING.total_seconds():.0f} seconds")
                time.sleep(0.001)
            self.group = joining.result()
        except (RuntimeError, ValueError) as error:
            raise UserError(
                f"the trainer and an engine's {meeting.workers} workers did not all meet at {meeting.host}:"
                f"{meeting.port} ({str(error).splitlines()[0][:200]}); is engine.tensor_parallel that of the engine?"
            ) from error

    def send(self, path: Path, size: int, check: Callable[[], None]) -> None:
        """The first ``size`` bytes of a file, which has to have them. ``check`` is called meanwhile, and may raise."""
        with path.open("rb") as file:
            for start in range(0, size, CHUNK):
                chunk = bytearray(file.read(min(CHUNK, size - start)))
                if len(chunk) != min(CHUNK, size - start):
                    raise UserError(f"{path} has become shorter while it was sent; what else writes there?")
                self._broadcast(torch.frombuffer(chunk, dtype=torch.uint8).to(self.device), check)

    def receive(self, size: int, target: Path) -> None:
        """Write ``size`` bytes that come to a new file. Raises ``WireBroken``."""
        with target.open("xb") as file:
            for start in range(0, size, CHUNK):
                chunk = torch.empty(min(CHUNK, size - start), dtype=torch.uint8, device=self.device)
                self._broadcast(chunk, lambda: None)
                file.write(chunk.cpu().numpy())

    def close(self) -> None:
        """Let go of the group, and of what is under way in it."""
        if self.group is None:
            return
        self.group.abort()
        self.group = self.store = None  # gloo closes its connections with its last reference

    def _broadcast(self, chunk: Tensor, check: Callable[[], None]) -> None:
        try:
            work = _from_trainer(self.group, chunk)
            while not work.is_completed():  # `wait` returns late, or never, where the other side is gone
                check()
                time.sleep(0.0005)
            work.wait(DONE)  # without a time NCCL would not say that it failed
        except RuntimeError as error:
            raise WireBroken(f"the other side is gone ({str(error).splitlines()[0][:200]})") from error


def listen(wiring: Wiring, engine: str) -> tuple[Meeting, dist.Store]:
    """A meeting that the trainer calls with the engine of that address, and the store that lives there.

    Raises ``UserError`` for an address that is none of this machine's.
    """
    host = wiring.host or address_towards(engine)
    try:
        with socket.create_server((host, 0)) as server:
            port = server.getsockname()[1]
            store = dist.TCPStore(
                host, port, None, True, MEETING, wait_for_workers=False, master_listen_fd=server.detach()
            )
    except OSError as error:
        raise UserError(
            f"engine.meet_at {host} is no address of this machine ({error.strerror}); set another"
        ) from error
    return Meeting(host, port, wiring.workers, "nccl" if wiring.device.type == "cuda" else "gloo"), store


def await_workers(store: dist.Store, meeting: Meeting, check: Callable[[], None]) -> None:
    """Return once all workers have come. ``check`` is called meanwhile, and may raise. Raises ``UserError`` if not."""
    until = time.monotonic() + MEETING.total_seconds()
    while (come := store.add(COME, 0)) < meeting.workers:
        check()
        if time.monotonic() > until:
            raise UserError(
                f"{come} of an engine's {meeting.workers} workers came to {meeting.host}:{meeting.port}; is "
                "engine.tensor_parallel that of the engine, and engine.meet_at an address by which it reaches this one?"
            )
        time.sleep(0.01)


def visit(meeting: Meeting) -> dist.Store:
    """The trainer's store, for a worker. Raises ``UserError`` if it is not there."""
    try:
        store = dist.TCPStore(meeting.host, meeting.port, None, False, VISIT)
        store.add(COME, 1)
    except RuntimeError as error:
        raise UserError(
            f"the trainer is not at {meeting.host}:{meeting.port} ({str(error).splitlines()[0][:200]}); set "
            "engine.meet_at to an address by which engines reach it"
        ) from error
    return store


def address_towards(host: str) -> str:
    """The address of this machine by which it reaches another. Raises ``UserError`` for a host that is unknown."""
    try:
        ((family, *_, address), *_) = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            return probe.getsockname()[0]
    except OSError as error:
        raise UserError(f"{host} is no address that is reached from here ({error.strerror}); set another") from error


def _join(
    meeting: Meeting, member: int, store: dist.Store, device: torch.device, patience: float
) -> dist.ProcessGroupGloo | dist.ProcessGroupNCCL:
    members, timeout = meeting.workers + 1, timedelta(seconds=patience)
    if meeting.backend == "gloo":
        options = dist.ProcessGroupGloo._Options()
        # By the address of the meeting, on either side: torch's default is what the machine's own name stands for,
        # on many of them the loopback address.
        own = meeting.host if member == 0 else address_towards(meeting.host)
        options._devices, options._timeout = [dist.ProcessGroupGloo.create_device(hostname=own)], timeout
        return dist.ProcessGroupGloo(store, member, members, options)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    with _failing_alone():
        group = dist.ProcessGroupNCCL(store, member, members, options)
    # NCCL meets in its first operation, and not before.
    _from_trainer(group, torch.zeros(1, dtype=torch.uint8, device=device)).wait(MEETING)
    return group


def _from_trainer(group: dist.ProcessGroupGloo | dist.ProcessGroupNCCL, chunk: Tensor) -> dist.Work:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return group.broadcast([chunk], options)


@contextmanager
def _failing_alone() -> Iterator[None]:
    """A group of NCCL that is made here fails by itself (2: CleanUpOnly). The default is to end the whole process."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "2"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
