"""Files from the trainer straight to an engine's workers, where they share no folder: by NCCL, or by gloo on a CPU.

Each engine has a group of its own with the trainer's rank it belongs to, which is member 0; the workers follow. So an
engine that is lost takes no other along, and one that is back gets a new group. The groups are no part of torch's own.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from scaled.errors import UserError

CHUNK = 2**26  # bytes that are sent at a time
COME = "come"
MEETING = timedelta(seconds=120)  # in which all members must have come


class WireBroken(RuntimeError):
    """The other side is gone, or has given up. Nothing more can be sent on this wire."""


@dataclass(frozen=True)
class Wiring:
    """How a trainer reaches an engine of so many workers: at which of its own addresses, from which device."""

    host: str
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

    def __init__(self, meeting: Meeting, member: int, store: dist.Store, device: torch.device, patience: float) -> None:
        """Returns once all members are there. Raises ``UserError`` if they are not in time."""
        self.device, self.store = device, store
        members = meeting.workers + 1
        try:
            if meeting.backend == "gloo":
                options = dist.ProcessGroupGloo._Options()
                options._devices, options._timeout = [_gloo_device(meeting.host)], timedelta(seconds=patience)
                self.group = dist.ProcessGroupGloo(store, member, members, options)
            else:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timedelta(seconds=patience)
                self.group = dist.ProcessGroupNCCL(store, member, members, options)
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
        self.group.abort()
        self.group = self.store = None  # gloo closes its connections with its last reference

    def _broadcast(self, chunk: Tensor, check: Callable[[], None]) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        try:
            work = self.group.broadcast([chunk], options)
            while not work.is_completed():  # `wait` returns late, or never, where the other side is gone
                check()
                time.sleep(0.0005)
            work.wait()
        except RuntimeError as error:
            raise WireBroken(f"the other side is gone ({str(error).splitlines()[0][:200]})") from error


def listen(wiring: Wiring) -> tuple[Meeting, dist.Store]:
    """A meeting that the trainer calls, and the store that lives there.

    Raises ``UserError`` for an address that is none of this machine's.
    """
    host = wiring.host
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
    """Return once all workers have come. ``check`` is called meanwhile, and may raise. Raises ``WireBroken`` if not."""
    until = time.monotonic() + MEETING.total_seconds()
    while (come := store.add(COME, 0)) < meeting.workers:
        check()
        if time.monotonic() > until:
            raise WireBroken(f"{come} of {meeting.workers} workers came to {meeting.host}:{meeting.port}")
        time.sleep(0.01)


def visit(meeting: Meeting) -> dist.Store:
    """The trainer's store, for a worker. Raises ``UserError`` if it is not there."""
    try:
        store = dist.TCPStore(meeting.host, meeting.port, None, False, MEETING)
        store.add(COME, 1)
    except RuntimeError as error:
        raise UserError(
            f"the trainer is not at {meeting.host}:{meeting.port} ({str(error).splitlines()[0][:200]}); set "
            "engine.meet_at to an address by which engines reach it"
        ) from error
    return store


def _gloo_device(host: str) -> dist.ProcessGroupGloo.Device:
    """Of a meeting on the loopback address, nothing is to be reached from elsewhere."""
    if ip_address(socket.gethostbyname(host)).is_loopback:
        return dist.ProcessGroupGloo.create_device(hostname=host)
    return dist.ProcessGroupGloo.create_default_device()
