"""A vLLM engine as a process of its own: started, awaited, and taken down with all its children."""

from __future__ import annotations

import errno
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch

from scaled.engine.token import TOKEN
from scaled.errors import UserError
from scaled.policy_sync import guard
from scaled.policy_sync.client import ILL, EngineClient
from scaled.policy_sync.wire import Wiring

ENDS = 8.0  # seconds that an engine may take to end when asked to


def engine_token() -> str:
    """The token of the environment, or a new one."""
    return os.environ.get(TOKEN) or secrets.token_urlsafe(32)


@dataclass(frozen=True)
class EngineSettings:
    """How an engine is started. ``python`` is that of the environment which has vLLM and this project.

    ``token`` is what it asks for, that of ``LOGRA_ENGINE_TOKEN`` or a new one.
    """

    python: Path
    model: Path
    log: Path
    dtype: str = "float32"
    tensor_parallel: int = 1
    max_model_len: int | None = None
    host: str = "127.0.0.1"
    port: int | None = None
    gpus: Sequence[int] = ()
    patience: float = 600.0
    token: str = field(default_factory=engine_token, repr=False)

    def command(self, port: int) -> list[str]:
        """The server, with our backend for weights, our guard, and log-probabilities after temperature."""
        command = [str(self.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        command += ["--served-model-name", "policy", "--host", self.host, "--port", str(port)]
        command += ["--middleware", "scaled.engine.token.RequireToken"]
        command += ["--dtype", self.dtype, "--tensor-parallel-size", str(self.tensor_parallel)]
        command += ["--weight-transfer-config", json.dumps({"backend": "logra"})]
        command += ["--worker-extension-cls", "scaled.engine.transfer.WorkerExtension"]
        command += ["--logprobs-mode", "processed_logprobs", "--enable-scale-out"]
        if not torch.cuda.is_available():
            # A seeded request whose prompt is split over two steps ends a CPU engine: it takes back a draw there,
            # and generators of a CPU cannot.
            command += ["--no-enable-chunked-prefill", "--enforce-eager"]
        if self.max_model_len is not None:
            command += ["--max-model-len", str(self.max_model_len)]
        return command

    def environment(self) -> dict[str, str]:
        """The routes that change weights are vLLM's developer mode. On a CPU each worker has cores of its own, and
        nothing is compiled: that would want a C++ compiler, and paths without spaces."""
        found = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        found[TOKEN] = self.token
        if torch.cuda.is_available():
            return found | ({"CUDA_VISIBLE_DEVICES": visible(self.gpus)} if self.gpus else {})
        cores = sorted(os.sched_getaffinity(0))
        own = [cores[i :: self.tensor_parallel] or [cores[i % len(cores)]] for i in range(self.tensor_parallel)]
        bind = "|".join(",".join(map(str, some)) for some in own)
        return found | {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": bind}


class EngineProcess:
    """An engine on this machine. It ends with this process, however this one ends."""

    def __init__(self, settings: EngineSettings) -> None:
        """Start it. Raises ``UserError`` for an environment that is missing and for a port that is taken."""
        if not settings.python.is_file():
            raise UserError(
                f"{settings.python} is not there, the Python of an environment with vLLM; make it by: make engine"
            )
        self.settings = settings
        self.port = settings.port or free_port()
        host = own_address(settings.host)
        try:
            with socket.create_server((settings.host, self.port)):
                pass
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                what = f"port {self.port} is taken by another program; set another, or none for a free one"
            else:
                what = f"an engine cannot listen at {settings.host}:{self.port} ({error.strerror}); set another host"
            raise UserError(what) from error
        self.url = f"http://{host}:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self._health = self.client()
        self.start()

    def client(self, wiring: Wiring | None = None) -> EngineClient:
        """One for this engine."""
        return EngineClient(self.url, wiring=wiring, token=self.settings.token)

    def start(self) -> None:
        """Start it, or start it again where it was."""
        if self.process is not None:
            end(self.process)
        settings = self.settings
        self._answered, self._ill = False, 0
        with settings.log.open("ab") as log:
            self._old = log.tell()
            environment = os.environ | settings.environment()
            self.process = guarded(settings.command(self.port), environment, ends=ENDS, output=log)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def died(self) -> bool:
        """Whether it has ended, or answers no more though it did; to be asked every second or so.

        A server whose core has died in a request waits for that request, and never ends.
        """
        if not self.alive:
            return True
        well = self._health.healthy()
        self._answered = self._answered or well
        self._ill = self._ill + 1 if self._answered and not well else 0
        return self._ill >= ILL

    def await_health(self, client: EngineClient, waiting: Callable[[float], None] = lambda seconds: None) -> None:
        """Return once the engine answers; ``waiting`` is told the seconds until then. Raises ``UserError`` with the
        end of its log if it ends before, or takes too long."""

        def look(seconds: float) -> None:
            if not self.alive:
                raise UserError(
                    f"the engine ended before it answered (exit code {self.process.returncode}): {self.last_words()}"
                )
            waiting(seconds)

        client.await_health(self.settings.patience, look)
        self._answered = True

    def last_words(self) -> str:
        """What its log ends with since it was started, or the last error there."""
        with self.settings.log.open("rb") as log:
            log.seek(self._old)
            lines = log.read().decode(errors="replace").splitlines()
        if not lines:
            return f"nothing in {self.settings.log}; is {self.settings.python} of an environment with vLLM? make engine"
        errors = [line for line in lines if "Error" in line]
        return f"{(errors or lines)[-1].strip()[-500:]} (all of it: {self.settings.log})"

    def wait(self) -> int:
        """Its exit code, once it has ended; 1 for one that answers no more, and in place of 0.

        A server whose core has died may close as if it had been asked to.
        """
        while not self.died():
            time.sleep(1.0)
        return self.process.poll() or 1

    def stop(self) -> None:
        """Return when it and all that it has started are gone."""
        end(self.process)
        self._health.close()


@contextmanager
def engine(
    settings: EngineSettings,
    waiting: Callable[[float], None] = lambda seconds: None,
    wiring: Wiring | None = None,
) -> Iterator[EngineClient]:
    """An engine that answers, until the block is left; then it and all that it started are gone.

    Raises ``UserError`` as ``EngineProcess`` does.
    """
    with running(settings) as process, process.client(wiring) as client:
        process.await_health(client, waiting)
        yield client


@contextmanager
def running(settings: EngineSettings) -> Iterator[EngineProcess]:
    """An engine that was started, until the block is left. Raises ``UserError`` as ``EngineProcess`` does."""
    process = EngineProcess(settings)
    try:
        yield process
    finally:
        process.stop()


def guarded(
    command: Sequence[str], environment: dict[str, str], *, ends: float, output: BinaryIO | None = None
) -> subprocess.Popen[bytes]:
    """A command under ``guard``, which no signal from the terminal reaches; without ``output`` it writes to ours.

    It may take ``ends`` seconds to end when asked to.
    """
    return subprocess.Popen(
        [sys.executable, guard.__file__, str(ends), *command],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
        env=environment,
        start_new_session=True,
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """End a guarded command and all of its group: asked first, killed where that takes long."""
    process.stdin.close()
    process.wait()
    with suppress(ProcessLookupError):  # a guard that was killed itself could not do it
        os.killpg(process.pid, signal.SIGKILL)


def visible(gpus: Sequence[int]) -> str:
    """CUDA_VISIBLE_DEVICES for some of those that are visible here."""
    own = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ",".join(own.split(",")[gpu] if own else str(gpu) for gpu in gpus)


def own_address(host: str) -> str:
    """The address by which this machine reaches a server that it has bound to ``host``."""
    return "127.0.0.1" if host == "0.0.0.0" else host


def free_port() -> int:
    """A port of the loopback address that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
