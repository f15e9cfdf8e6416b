"""``logra doctor``: what is here, what a configuration needs, and what to do about what is amiss."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from scaled.files import size
from scaled.machine import Gpu, Machine, Needs, Package, find_needs, look_around

Verdict = Literal["ok", "warning", "missing"]
STYLES: dict[Verdict, str] = {"ok": "green", "warning": "yellow", "missing": "red"}

SHARED_MEMORY = 2**30  # containers have 64 MiB unless told, and ranks of one node talk through it
OPEN_FILES = 1024  # every rank holds sockets to every other, its logs and the model's shards
BF16_SINCE = (8, 0)  # compute capability


@dataclass(frozen=True)
class Line:
    """One finding; ``remedy`` is empty for what is well."""

    name: str
    found: str
    verdict: Verdict = "ok"
    remedy: str = ""


def doctor(config: Path | None, overrides: list[str], console: Console) -> bool:
    """Show everything, and say whether nothing is missing. Raises ``UserError`` for a configuration with errors."""
    machine = look_around()
    lines = list(judge_machine(machine))
    if config is not None and machine.broken is None:
        from scaled.config_file import load_config  # it needs the packages that may be missing

        lines += judge_needs(machine, find_needs(load_config(config, overrides)))
    table = Table("", "found", "", "remedy", title="logra doctor", title_justify="left")
    for line in lines:
        table.add_row(line.name, Text(line.found), Text(line.verdict, style=STYLES[line.verdict]), Text(line.remedy))
    console.print(table)
    missing = [line.name for line in lines if line.verdict == "missing"]
    console.print(f"missing: {', '.join(missing)}" if missing else "nothing is missing", markup=False)
    return not missing


def judge_machine(machine: Machine) -> Iterator[Line]:
    """What holds for any run."""
    for package in (machine.python, *machine.packages, *machine.engines):
        yield judge_package(package)
    if not machine.engines:
        yield Line("vllm", "not in this environment; engines have one of their own: make engine")
    if machine.torch is None:
        yield Line(
            "imports",
            machine.broken or "",
            "missing",
            "install as the README says; a torchvision made for another torch breaks transformers: pip uninstall it",
        )
    else:
        yield from judge_torch(machine)
    yield Line("memory", f"{size(machine.memory)} available")
    yield judge_shared_memory(machine.shared_memory)
    yield judge_port(machine)
    few = machine.open_files < OPEN_FILES and machine.open_files >= 0
    yield Line(
        "open files",
        f"{machine.open_files} allowed" if machine.open_files >= 0 else "no limit",
        "warning" if few else "ok",
        f"ulimit -n {16 * OPEN_FILES}" if few else "",
    )


def judge_package(package: Package) -> Line:
    """Older than what the project asks for is missing; newer was never tried."""
    asked = f"{package.operator}{package.wanted}"
    install = f"pip install '{package.name}{asked}'"
    if package.installed is None:
        return Line(package.name, "not installed", "missing", install)
    if not asked:
        return Line(
            package.name, f"{package.installed}, and which is wanted is not known", "warning", "pip install -e ."
        )
    have, want = release(package.installed), release(package.wanted)
    found = f"{package.installed} ({asked})"
    remedy = "install Python " + package.wanted if package.name == "python" else install
    if have < want:
        return Line(package.name, found, "missing", remedy)
    newer = {"==": have > want, "~=": have[: len(want) - 1] > want[:-1], ">=": False}[package.operator]
    return Line(package.name, found, "warning", f"never tried; {remedy}") if newer else Line(package.name, found)


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version, without what follows them: (2, 13, 0) of 2.13.0+cpu."""
    return tuple(map(int, re.match(r"\d+(\.\d+)*", version)[0].split(".")))


def judge_torch(machine: Machine) -> Iterator[Line]:
    """Builds, GPUs and what ranks talk by."""
    found = machine.torch
    yield Line("torch is built for", f"CUDA {found.cuda}" if found.cuda else "the CPU")
    if found.gpus:
        for index, gpu in enumerate(found.gpus):
            yield judge_gpu(index, gpu)
        no_nccl = len(found.gpus) > 1 and found.nccl is None
        yield Line(
            "NCCL",
            found.nccl or "not in this torch",
            "missing" if no_nccl else "ok",
            "several GPUs need it; install torch's CUDA build for Linux" if no_nccl else "",
        )
    elif machine.nvidia_driver:
        remedy = "a GPU's driver is here: " + (
            "see nvidia-smi and CUDA_VISIBLE_DEVICES" if found.cuda else "pip install torch's CUDA build"
        )
        yield Line("GPUs", "torch sees none", "warning", remedy)
    else:
        yield Line("GPUs", "none")
    yield Line(
        "gloo",
        "available" if found.gloo else "not in this torch",
        "ok" if found.gloo else "missing",
        "" if found.gloo else "several ranks need it; install an ordinary build of torch",
    )
    idle = found.threads > machine.cores
    yield Line(
        "CPU",
        f"{machine.cores} cores, torch uses {found.threads} threads",
        "warning" if idle else "ok",
        f"OMP_NUM_THREADS={machine.cores}, shared among the ranks of a machine" if idle else "",
    )


def judge_gpu(index: int, gpu: Gpu) -> Line:
    """A GPU that has no bf16 of its own computes it slowly or not at all."""
    found = f"{gpu.name}, {size(gpu.memory)}, compute capability {gpu.capability[0]}.{gpu.capability[1]}"
    if gpu.capability < BF16_SINCE:
        return Line(f"GPU {index}", f"{found}, no bf16", "warning", "set model.compute_dtype=float32")
    return Line(f"GPU {index}", f"{found}, bf16")


def judge_shared_memory(free: int | None) -> Line:
    """Ranks of one machine exchange data there."""
    if free is None:
        return Line("/dev/shm", "not there", "warning", "several ranks on one machine may need it")
    if free < SHARED_MEMORY:
        return Line("/dev/shm", f"{size(free)} free", "warning", "several ranks need 1 GiB: docker run --shm-size=8g")
    return Line("/dev/shm", f"{size(free)} free")


def judge_port(machine: Machine) -> Line:
    """torchrun's first process listens at a port, even if all ranks are on one machine."""
    if machine.port_free:
        return Line("port", f"{machine.port} of the loopback is free")
    if machine.other_port is None:
        return Line(
            "port", "none of the loopback can be listened at", "missing", "allow it; ranks find each other there"
        )
    return Line(
        "port",
        f"{machine.port} of the loopback is taken",
        "warning",
        f"torchrun --master-port {machine.other_port}, for one",
    )


def judge_needs(machine: Machine, needs: Needs) -> Iterator[Line]:
    """What holds for the configuration's run."""
    gpus = machine.torch.gpus if machine.torch else ()
    if needs.unknown:
        yield Line("the run", f"{needs.run}, what it needs is not known", "missing", needs.unknown)
        return
    weights = 4 * needs.parameters
    yield Line(
        "the run",
        f"{needs.parameters:,} parameters on {needs.device}; in fp32 {size(weights)}, kept for training "
        f"{size(needs.state)}; activations and libraries come on top",
    )
    if needs.device == "cpu":
        remedy = "a smaller model, or more memory"
        yield _enough("host memory", weights + needs.state, machine.memory, remedy)
    else:
        remedy = "the first rank reads the model whole, in fp32; take a machine with more memory"
        yield _enough("host memory", weights, machine.memory, remedy)
        remedy = "weights and state are shared among all GPUs; take more of them, or a smaller model or rank"
        yield _enough("GPU memory", weights + needs.state, sum(gpu.memory for gpu in gpus), remedy)
    count = needs.keep_last + 1
    remedy = "make room, set run=FOLDER on another disk, or a smaller checkpoint.keep_last"
    yield _enough(f"disk, {count} checkpoints", count * needs.checkpoint, needs.disk_free, remedy)
    if needs.compute_dtype == "bfloat16" and needs.device == "cpu":
        slow = "set model.compute_dtype=float32, which is faster on most CPUs"
        yield Line("compute type", "bfloat16 on a CPU", "warning", slow)
    if needs.engines is not None:
        there = needs.engines.is_file()
        found = f"{needs.engines}{'' if there else ' is not there'}"
        remedy = "make engine, or set launch.python to the Python of an environment with vLLM"
        yield Line("engines", found) if there else Line("engines", found, "missing", remedy)
    if needs.threads and needs.threads > machine.cores:
        found = f"{needs.threads} threads a rank on {machine.cores} cores"
        yield Line("threads", found, "warning", f"set threads={machine.cores}, or less with several ranks")


def _enough(name: str, needed: int, there: int, remedy: str) -> Line:
    found = f"{size(needed)} needed at least, {size(there)} there"
    return Line(name, found) if needed <= there else Line(name, found, "missing", remedy)
