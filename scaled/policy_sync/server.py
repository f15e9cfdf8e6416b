"""A vLLM engine as a process of its own: started, awaited, and taken down with all its children."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from scaled.errors import UserError
from scaled.policy_sync.client import EngineClient

STARTS = 300.0  # seconds that an engine may take until it answers
ENDS = 10.0  # seconds that it may take to end when asked to


@dataclass(frozen=True)
class EngineSettings:
    """How an engine is started. ``python`` is that of the environment which has vLLM and this project."""

    python: Path
    model: Path
    log: Path
    dtype: str = "float32"
    tensor_parallel: int = 1
    max_model_len: int | None = None
    port: int | None = None

    def command(self, port: int) -> list[str]:
        """The server on the loopback address, with our backend for weights and log-probabilities after temperature."""
        command = [str(self.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        command += ["--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--dtype", self.dtype, "--tensor-parallel-size", str(self.tensor_parallel)]
        command += ["--weight-transfer-config", json.dumps({"backend": "logra"})]
        command += ["--worker-extension-cls", "scaled.engine.transfer.WorkerExtension"]
        command += ["--logprobs-mode", "processed_logprobs", "--enforce-eager"]
        if self.max_model_len is not None:
            command += ["--max-model-len", str(self.max_model_len)]
        return command

    def environment(self) -> dict[str, str]:
        """The routes that change weights are vLLM's developer mode. On a CPU each worker has cores of its own, and
        nothing is compiled: that would want a C++ compiler, and paths without spaces."""
        found = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if torch.cuda.is_available():
            return found
        cores = sorted(os.sched_getaffinity(0))
        own = [cores[i :: self.tensor_parallel] for i in range(self.tensor_parallel)]
        bind = "|".join(",".join(map(str, some)) for some in own)
        return found | {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": bind}


@contextmanager
def engine(settings: EngineSettings, waiting: Callable[[float], None] = lambda seconds: None) -> Iterator[EngineClient]:
    """An engine that answers, until the block is left; then it and all that it started are gone.

    ``waiting`` is told the seconds until it answers. Raises ``UserError`` for a port that is taken, an engine that ends
    or does not answer in time, with the end of its log.
    """
    if not settings.python.is_file():
        raise UserError(
            f"{settings.python} is not there, the Python of an environment with vLLM; make it by: make engine"
        )
    port = settings.port or free_port()
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise UserError(f"port {port} is taken by another program; set another, or none to take a free one")
    # Its own session: vLLM's server leaves its children behind when it is killed, and so the whole group is.
    with settings.log.open("wb") as log:
        process = subprocess.Popen(
            settings.command(port),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | settings.environment(),
            start_new_session=True,
        )
    try:
        with EngineClient(f"http://127.0.0.1:{port}") as client:
            await_health(process, client, settings.log, waiting)
            yield client
    finally:
        end_group(process)


def await_health(
    process: subprocess.Popen[bytes], client: EngineClient, log: Path, waiting: Callable[[float], None]
) -> None:
    """Return once the engine answers."""
    started = time.monotonic()
    while not client.healthy():
        if process.poll() is not None:
            raise UserError(f"the engine ended before it answered (exit code {process.returncode}): {_end_of(log)}")
        if time.monotonic() - started > STARTS:
            raise UserError(f"the engine does not answer after {STARTS:.0f} seconds; its log is {log}: {_end_of(log)}")
        waiting(time.monotonic() - started)
        time.sleep(0.5)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and all of its group: asked first, killed where that takes long."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDS)
    # The leader may be gone and its children not.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def free_port() -> int:
    """A port of the loopback address that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _end_of(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["its log is empty"])[-1].strip()[-500:]
