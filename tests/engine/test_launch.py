"""Training with real engines: exact after every update, one that dies is caught up, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from scaled.config_file import load_config
from scaled.engine.token import TOKEN
from scaled.errors import UserError
from scaled.launch import launch
from scaled.policy_sync.server import free_port
from scaled.train import train
from tests.engine.setting import PYTHON, ROOT

SMALL = """
microbatch: 4
reward: tests.checksum:score
data: {task: arithmetic, held_out: 4}
rollout: {backend: vllm, prompts: 8, max_new_tokens: 6}
logra: {rank: 8, update_ratio: 1e-3}
control: {positions: 12, budget_max: 1e-2, budget_min: 1e-2}
engine: {max_model_len: 128, verify_every: 1}
"""


def config_file(folder: Path, model: Path) -> Path:
    file = folder / "small.yaml"
    file.write_text(f"run: {folder / 'run'}\nupdates: 3\nmodel: {{path: {model}, device: cpu}}\n{SMALL}")
    return file


@contextmanager
def launching(folder: Path, model: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """``logra launch`` in a session of its own."""
    command = [
        str(ROOT / ".venv/bin/logra"),
        "launch",
        str(config_file(folder, model)),
        f"launch.python={PYTHON}",
        *overrides,
    ]
    launched = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with launched:
        try:
            yield launched
        finally:
            launched.kill()  # where a test has failed


def until(found: Callable[[], bool], launched: subprocess.Popen[str], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not found():
        assert launched.poll() is None, launched.stdout.read()
        assert time.monotonic() < end
        time.sleep(0.1)


def rows(folder: Path) -> list[dict]:
    log = folder / "run/metrics.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def family(launched: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(launched.pid).children(recursive=True)


def servers(launched: subprocess.Popen[str]) -> list[psutil.Process]:
    """The engines' own processes, in the order of their start."""
    found = [p for p in family(launched) if "vllm.entrypoints.openai.api_server" in p.cmdline()[:3]]
    return sorted(found, key=lambda process: process.create_time())


def require_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []


def test_two_ranks_and_two_bf16_engines_stay_equal_bit_for_bit_though_an_engine_is_killed(model, tmp_path):
    overrides = ("launch.ranks=2", "launch.engines=2", "engine.dtype=bfloat16", "engine.low_halves=host", "updates=4")
    with launching(tmp_path, model, *overrides) as launched:
        until(lambda: any("q" in row for row in rows(tmp_path)), launched)
        all_of_it = family(launched)
        servers(launched)[0].parent().kill()  # its guard, which can take nothing along
        output, _ = launched.communicate(timeout=300)
    assert launched.returncode == 0, output
    assert "died and is started again" in output
    require_gone(all_of_it)
    updates = [row for row in rows(tmp_path) if "q" in row]
    assert [(row["update"], row["batch"]) for row in updates] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    for row in updates:
        assert row["other_version"] == 0
        assert 0 < row["log_prob_difference"] < 0.1  # bf16 against fp32: not equal, and close
    assert all(row["sync_bytes"] > 0 for row in updates[1:])
    assert not any((tmp_path / "run/sync").glob("*"))


def test_a_trainer_that_is_killed_takes_its_engine_along_and_the_run_goes_on_from_its_checkpoint(model, tmp_path):
    overrides = ("method=lora", "lora.rank=4", "policy_sync=full", "checkpoint.every=1", "updates=3")
    overrides += ("engine.transport=broadcast",)
    with launching(tmp_path, model, *overrides) as launched:
        until(lambda: any((tmp_path / "run/checkpoints").glob("update-*")), launched)
        all_of_it = family(launched)
        trainer = next(p for p in reversed(all_of_it) if "scaled" in p.cmdline()[:4])
        trainer.kill()
        output, _ = launched.communicate(timeout=60)
    assert launched.returncode == 128 + signal.SIGKILL, output
    require_gone(all_of_it)
    with launching(tmp_path, model, *overrides, "--resume") as resumed:
        output, _ = resumed.communicate(timeout=240)
    assert resumed.returncode == 0, output
    assert [row["update"] for row in rows(tmp_path) if "q" in row] == [1, 2, 3]


def test_an_engine_that_stalls_ends_the_run_with_one_error_and_what_was_learned_is_saved(model, tmp_path):
    with launching(tmp_path, model, "engine.patience=3", "updates=100") as launched:
        until(lambda: any("q" in row for row in rows(tmp_path)), launched)
        all_of_it = family(launched)
        for process in servers(launched)[0].children(recursive=True):
            process.suspend()
        output, _ = launched.communicate(timeout=120)
    assert launched.returncode == 2, output
    words = " ".join(output.split())
    assert "does not answer" in words or "is gone while it writes" in words
    assert f"go on with: logra launch {tmp_path}/run --resume" in words
    require_gone(all_of_it)
    last = max(row["update"] for row in rows(tmp_path) if "q" in row)
    assert (tmp_path / f"run/checkpoints/update-{last:06d}").is_dir()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_launcher_that_ends_while_engines_start_leaves_nothing(model, tmp_path, number):
    with launching(tmp_path, model) as launched:
        until(lambda: bool(servers(launched)), launched)
        time.sleep(1)
        all_of_it = family(launched)
        launched.send_signal(number)
        launched.wait(20)
    require_gone(all_of_it)


def test_what_can_be_known_before_an_engine_starts_is_said_then(model, tmp_path):
    file = config_file(tmp_path, model)
    for overrides, resume, said in (
        (["rollout.backend=hf"], False, "set rollout.backend=vllm, or use `logra train`"),
        (["method=dense"], False, "`policy_sync` factors needs `method` logra, not dense; set policy_sync=full"),
        (["logra.kind=gaussian"], False, "set policy_sync=full"),
        ([f"launch.python={tmp_path}/none"], False, "make it by: make engine"),
        ([], True, "has no checkpoint to resume from"),
    ):
        with pytest.raises(UserError, match=said):
            launch(file, overrides, Console(), resume=resume)
    for urls, said in (
        ("[]", "`logra launch` in place of `logra train` starts them"),
        ("[http://127.0.0.1:9]", "engine http://127.0.0.1:9 does not answer; start it"),
    ):
        with pytest.raises(UserError, match=said):
            train(load_config(file, [f"engine.urls={urls}"]))
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_ctrl_c_saves_says_how_to_go_on_and_leaves_nothing_behind(model, tmp_path):
    with launching(tmp_path, model, "updates=100") as launched:
        until(lambda: any("q" in row for row in rows(tmp_path)), launched)
        all_of_it = family(launched)
        os.killpg(launched.pid, signal.SIGINT)  # as a terminal does it: to the whole group
        output, _ = launched.communicate(timeout=120)
    assert launched.returncode == 130, output
    assert "--resume" in output
    require_gone(all_of_it)
    last = max(row["update"] for row in rows(tmp_path) if "q" in row)
    assert (tmp_path / f"run/checkpoints/update-{last:06d}").is_dir()


def test_an_engine_run_by_itself_serves_one_trainer_after_another_and_ends_when_its_core_has_died(model, tmp_path):
    environment = os.environ | {TOKEN: "a-secret", "OMP_NUM_THREADS": "1"}
    logra, port = str(ROOT / ".venv/bin/logra"), free_port()
    command = [logra, "engine", str(model), "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "128"]
    command += ["--engine-python", str(PYTHON), "--log", str(tmp_path / "engine.log")]
    settings = {"env": environment, "cwd": ROOT, "text": True}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, start_new_session=True, **settings, **pipes) as served:
        try:
            assert served.stdout.readline() == f"engine.urls=[http://127.0.0.1:{port}]\n"
            for name, given in (("exact", ["engine.transport=broadcast"]), ("naive", ["engine.verify_every=0"])):
                train = [logra, "train", str(config_file(tmp_path, model)), f"run={tmp_path / name}", "updates=2"]
                train += [f"engine.urls=[http://127.0.0.1:{port}]", "engine.dtype=bfloat16", f"engine.rounding={name}"]
                done = subprocess.run([*train, *given], timeout=240, **settings, **pipes)
                assert done.returncode == 0, done.stdout
            core = next(p for p in family(served) if "EngineCore" in " ".join([p.name(), *p.cmdline()]))
            core.kill()
            output, _ = served.communicate(timeout=60)
            assert served.returncode != 0
            assert "the engine has ended, or answers no more" in output
        finally:
            served.kill()
