from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from typer.testing import CliRunner

from scaled import machine as facts
from scaled.cli import app
from scaled.config import RunConfig
from scaled.doctor import Line, judge_machine, judge_needs, judge_package
from scaled.errors import UserError
from scaled.machine import (
    Gpu,
    Machine,
    Needs,
    Package,
    TorchFacts,
    find_needs,
    listening_port,
    look_around,
    torch_facts,
)
from tests.training import settings

GIB = 2**30
A_GPU = Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, (9, 0))
MACHINE = Machine(
    python=Package("python", "3.11.7", ">=", "3.11"),
    packages=(Package("torch", "2.13.0+cpu", "==", "2.13.0"), Package("accelerate", "1.15.2", "~=", "1.15.0")),
    engines=(),
    torch=TorchFacts(cuda=None, gpus=(), nccl=None, gloo=True, threads=2),
    broken=None,
    nvidia_driver=False,
    cores=2,
    memory=24 * GIB,
    shared_memory=12 * GIB,
    port=29500,
    port_free=True,
    other_port=29511,
    open_files=4096,
)
ON_GPUS = replace(MACHINE, torch=TorchFacts("13.0", (A_GPU, A_GPU), "2.28.3", gloo=True, threads=2))
NEEDS = Needs(
    run=Path("runs/demo"),
    disk_free=100 * GIB,
    keep_last=2,
    device="cpu",
    compute_dtype="float32",
    threads=None,
    parameters=GIB,
    state=2 * GIB,
    checkpoint=5 * GIB,
)


def amiss(machine: Machine, needs: Needs | None = None) -> dict[str, Line]:
    lines = list(judge_machine(machine)) + (list(judge_needs(machine, needs)) if needs else [])
    assert all((line.remedy == "") == (line.verdict == "ok") for line in lines)
    return {line.name: line for line in lines if line.verdict != "ok"}


def test_nothing_is_amiss_with_a_machine_that_has_all():
    assert amiss(MACHINE, NEEDS) == {}
    assert amiss(ON_GPUS, replace(NEEDS, device="cuda", compute_dtype="bfloat16")) == {}


@pytest.mark.parametrize(
    ("installed", "asked", "verdict"),
    [
        (None, ("==", "2.13.0"), "missing"),
        ("2.13.0+cu130", ("==", "2.13.0"), "ok"),
        ("2.12.9", ("==", "2.13.0"), "missing"),
        ("2.13.1", ("==", "2.13.0"), "warning"),
        ("1.15.9", ("~=", "1.15.0"), "ok"),
        ("1.16.0", ("~=", "1.15.0"), "warning"),
        ("1.9.12", ("~=", "1.15.0"), "missing"),
        ("15.3", ("~=", "15.0"), "ok"),
        ("3.14.0rc1", (">=", "3.11"), "ok"),
        ("2.13.0", ("", ""), "warning"),
    ],
)
def test_versions_are_compared_as_numbers_with_the_range_of_the_project(installed, asked, verdict):
    line = judge_package(Package("torch", installed, *asked))
    assert line.verdict == verdict
    if verdict != "ok":
        assert "pip install" in line.remedy


def test_every_fact_that_is_wrong_is_a_line_with_its_remedy():
    old = replace(MACHINE, python=Package("python", "3.10.2", ">=", "3.11"))
    assert amiss(old)["python"].remedy == "install Python 3.11"
    broken = replace(MACHINE, torch=None, broken="RuntimeError: operator torchvision::nms does not exist")
    assert "torchvision" in amiss(broken)["imports"].remedy
    unseen = amiss(replace(MACHINE, nvidia_driver=True))["GPUs"]
    assert (unseen.verdict, "CUDA build" in unseen.remedy) == ("warning", True)
    no_nccl = replace(ON_GPUS, torch=replace(ON_GPUS.torch, nccl=None))
    assert amiss(no_nccl)["NCCL"].verdict == "missing"
    old_gpu = replace(ON_GPUS, torch=replace(ON_GPUS.torch, gpus=(Gpu("Tesla V100", 16 * GIB, (7, 0)),)))
    assert "float32" in amiss(old_gpu)["GPU 0"].remedy
    assert amiss(replace(MACHINE, torch=replace(MACHINE.torch, gloo=False)))["gloo"].verdict == "missing"
    assert amiss(replace(MACHINE, torch=replace(MACHINE.torch, threads=8)))["CPU"].remedy.startswith(
        "OMP_NUM_THREADS=2"
    )
    assert "--shm-size" in amiss(replace(MACHINE, shared_memory=64 * 2**20))["/dev/shm"].remedy
    assert amiss(replace(MACHINE, open_files=256))["open files"].remedy.startswith("ulimit -n")
    assert amiss(replace(MACHINE, open_files=-1)) == {}  # no limit


def test_too_little_memory_or_disk_is_missing_and_says_how_much_is_needed():
    line = amiss(replace(MACHINE, memory=6 * GIB - 1), NEEDS)["host memory"]
    assert (line.found, line.verdict) == ("6.00 GiB needed at least, 6.00 GiB there", "missing")
    assert "host memory" not in amiss(replace(MACHINE, memory=6 * GIB), NEEDS)
    # On a GPU the first rank reads the weights alone, and the GPUs share them and the state.
    on_gpus = replace(NEEDS, device="cuda", state=157 * GIB)
    assert amiss(replace(ON_GPUS, memory=4 * GIB), replace(on_gpus, state=156 * GIB)) == {}
    assert amiss(replace(ON_GPUS, memory=4 * GIB), on_gpus).keys() == {"GPU memory"}
    line = amiss(MACHINE, replace(NEEDS, disk_free=15 * GIB - 1))["disk, 3 checkpoints"]
    assert (line.found, line.verdict) == ("15.00 GiB needed at least, 15.00 GiB there", "missing")
    assert amiss(MACHINE, replace(NEEDS, disk_free=15 * GIB)) == {}


def test_settings_that_cost_time_are_warnings():
    found = amiss(MACHINE, replace(NEEDS, compute_dtype="bfloat16", threads=4))
    assert {name: line.verdict for name, line in found.items()} == {"compute type": "warning", "threads": "warning"}


def test_a_port_that_another_listens_at_is_taken_and_a_free_one_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        machine = look_around(port)
        assert (machine.port_free, listening_port(port)) == (False, None)
        line = amiss(machine)["port"]
        assert (line.found, line.verdict) == (f"{port} of the loopback is taken", "warning")
        assert line.remedy == f"torchrun --master-port {machine.other_port}, for one"
    assert listening_port(port) == port
    assert amiss(replace(machine, other_port=None))["port"].verdict == "missing"


def test_gpus_are_asked_of_torch(monkeypatch):
    seen = SimpleNamespace(name=A_GPU.name, total_memory=A_GPU.memory, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: seen)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 3))
    found = torch_facts()
    assert (found.gpus, found.nccl, found.gloo) == ((A_GPU, A_GPU), "2.28.3", True)


def test_imports_that_fail_are_a_fact_and_not_a_traceback(monkeypatch):
    def fails() -> None:
        raise RuntimeError("operator torchvision::nms does not exist\nand more")

    monkeypatch.setattr(facts, "torch_facts", fails)
    assert look_around().broken == "RuntimeError: operator torchvision::nms does not exist"


def test_a_project_that_is_not_installed_asks_for_no_version(monkeypatch):
    def unknown(name: str) -> None:
        raise facts.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(facts.importlib.metadata, "requires", unknown)
    assert [package.wanted for package in facts.installed(("torch",))] == [""]


@pytest.mark.parametrize("method", ["logra", "dense", "lora"])
def test_needs_are_counted_on_the_model_without_weights(tiny_model, tmp_path, method):
    config = settings(tiny_model, tmp_path / "a" / "run", method=method, lora={"rank": 3})
    needs = find_needs(config)
    # By hand: as in test_cli, 8,048 numbers, 3,840 of them in the matrices, whose outputs are 16, 8, 8, 16, 24, 24, 16.
    rows, columns, selected = 2 * 112, 2 * (6 * 16 + 24), 3840
    adapters = 3 * (rows + columns)
    saved = {"logra": rows, "dense": 2 * selected, "lora": 3 * adapters}[method]
    kept = {"logra": rows + rows * 4, "dense": 3 * selected, "lora": 4 * adapters}[method]
    signs = 14 * 4 * 8 if method == "logra" else 0  # a bit each, in whole words of 8 bytes for each of 4 rows
    assert (needs.parameters, needs.checkpoint, needs.state) == (8048, 4 * (8048 + saved), 4 * kept + signs)
    assert needs.disk_free > 0
    assert not (tmp_path / "a").exists()


def test_what_keeps_the_needs_from_being_known_is_missing(tiny_model, tmp_path):
    config = settings(tiny_model, tmp_path / "run")
    nowhere = config.model_copy(update={"model": config.model.model_copy(update={"path": f"{tmp_path}/no/model"})})
    line = amiss(MACHINE, find_needs(nowhere))["the run"]
    assert line.verdict == "missing"
    assert line.remedy.startswith("there is no model folder")


def test_smollm2_is_not_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("LOGRA_MODELS", str(tmp_path))
    config = RunConfig.model_validate(
        {"run": tmp_path / "run", "updates": 1, "model": {"path": "smollm2"}, "data": {"task": "arithmetic"}}
    )
    assert find_needs(config).unknown == f"smollm2 is not here yet; fetch it by: logra model smollm2 {tmp_path}/smollm2"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def recipe(tiny_model: Path, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    config = settings(tiny_model, tmp_path / "run").model_dump(mode="json")
    path.write_text(yaml.safe_dump(config))
    return path


def test_the_command_shows_a_table_and_its_exit_code_says_whether_anything_is_missing(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    machine = look_around()
    monkeypatch.setattr("scaled.doctor.look_around", lambda: machine)
    missing = [line for line in judge_machine(machine) if line.verdict == "missing"]
    assert missing == []
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0
    assert "torch" in done.stdout and done.stdout.endswith("nothing is missing\n")
    done = CliRunner().invoke(app, ["doctor", str(recipe)])
    assert done.exit_code == 0
    assert "8,048 parameters on cpu" in done.stdout
    done = CliRunner().invoke(app, ["doctor", str(recipe), f"model.path={tmp_path}"])
    assert done.exit_code == 2
    assert done.stdout.endswith("missing: the run\n")
    assert "has no config.json" in done.stdout
    assert not (tmp_path / "run").exists()


def test_a_configuration_with_an_error_is_told_as_by_train(recipe):
    done = CliRunner().invoke(app, ["doctor", str(recipe), "rank=3"])
    assert isinstance(done.exception, UserError)
    assert "did you mean logra.rank or lora.rank?" in str(done.exception)


def test_help_has_an_explanation_and_an_example():
    done = CliRunner().invoke(app, ["doctor", "--help"])
    assert done.exit_code == 0
    assert "Example: logra doctor " in done.stdout


def test_engines_that_are_to_be_launched_need_their_environment(tmp_path):
    assert amiss(MACHINE, replace(NEEDS, engines=tmp_path / "python"))["engines"].remedy.startswith("make engine")
    (tmp_path / "python").touch()
    assert amiss(MACHINE, replace(NEEDS, engines=tmp_path / "python")) == {}
