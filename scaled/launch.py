"""``logra launch``: engines and trainer on this machine, started together and ended together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console

from scaled.config import RunConfig
from scaled.config_file import load_config
from scaled.engine.token import TOKEN
from scaled.errors import UserError
from scaled.interrupt import Interrupted
from scaled.model import resolve_device, resolve_model
from scaled.policy_sync.server import EngineProcess, EngineSettings, end, engine_token, guarded, running, visible
from scaled.run import LOGS, find_checkpoint, require_new_folder

SAVES = 40.0  # seconds that a trainer has to save and end; torchrun gives its ranks 30 of them


def launch(config: Path, overrides: Sequence[str], console: Console, *, resume: bool = False) -> int:
    """Start engines, then the trainer that they follow; the trainer's exit code once it and they have ended.

    Interrupts go to the trainer, which saves. An engine that dies is started again on the same port, and the trainer
    brings it up to date. Raises ``UserError`` before anything is started for what can be known before.
    """
    settings = load_config(config, overrides)
    engines = engine_settings(settings)
    find_checkpoint(settings) if resume else require_new_folder(settings.run)
    (settings.run / LOGS).mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        processes = stack.enter_context(engines_running(engines, console))
        command = trainer_command(settings, config, overrides, [process.url for process in processes], resume=resume)
        environment = os.environ | trainer_environment(settings) | {TOKEN: engines[0].token}
        trainer = guarded(command, environment, ends=SAVES)
        stack.callback(end, trainer)
        with _signals(lambda number, frame: trainer.send_signal(number)):
            return _watch(trainer, processes, settings, console)


@contextmanager
def engines_running(engines: Sequence[EngineSettings], console: Console) -> Iterator[list[EngineProcess]]:
    """Engines that answer, until the block is left. Raises ``Interrupted`` if it is to stop before they do."""
    with ExitStack() as stack:
        processes = [stack.enter_context(running(one)) for one in engines]
        with _signals(_stop_starting), console.status("starting engines") as status:
            for number, process in enumerate(processes):
                with process.client() as client:
                    text = f"starting engine {number + 1} of {len(processes)}"
                    process.await_health(client, lambda seconds, text=text: status.update(f"{text}, {seconds:.0f} s"))
        yield processes


def serve(settings: EngineSettings, console: Console) -> int:
    """Run one engine until it ends, or is asked to; its exit code.

    Raises ``UserError`` without a token in the environment, and for an engine that cannot be started.
    """
    if not os.environ.get(TOKEN):
        raise UserError(f"set {TOKEN} in the environment to a secret, for this engine and for the trainer alike")
    with _signals(_stop_starting), running(settings) as process, process.client() as client:
        with console.status("starting") as status:
            process.await_health(client, lambda seconds: status.update(f"starting, {seconds:.0f} s"))
        host = socket.getfqdn() if settings.host == "0.0.0.0" else settings.host
        console.print(f"engine.urls=[http://{host}:{process.port}]", markup=False)
        code = process.wait()
        console.print(f"the engine has ended, or answers no more: {process.last_words()}", markup=False)
        return code


def engine_settings(config: RunConfig, *, training: bool = True) -> list[EngineSettings]:
    """How each engine of a configuration is started, beside a trainer if there is one. Raises ``UserError`` for a
    configuration without engines."""
    require_gpus(config, training=training)
    launch, engine, each = config.launch, config.engine, config.engine.tensor_parallel
    there, own = torch.cuda.device_count(), trainer_gpus(config) if training else 0
    model, token = Path(resolve_model(config.model.path)), engine_token()
    return [
        EngineSettings(
            python=launch.python,
            model=model,
            log=config.run / LOGS / f"engine-{number}.log",
            dtype=engine.dtype,
            tensor_parallel=each,
            max_model_len=config.longest,
            gpus=range(own + number * each, own + (number + 1) * each) if there else (),
            host=launch.host,
            patience=launch.patience,
            token=token,
        )
        for number in range(launch.engines)
    ]


def require_gpus(config: RunConfig, *, training: bool = True) -> None:
    """Raises ``UserError`` for a configuration without engines, and where GPUs are too few for them and a trainer."""
    if config.rollout.backend != "vllm":
        raise UserError("there is no engine to launch: set rollout.backend=vllm, or use `logra train`")
    launch, each, there = config.launch, config.engine.tensor_parallel, torch.cuda.device_count()
    own = trainer_gpus(config) if training else 0
    wanted = own + launch.engines * each
    if 0 < there < wanted:
        raise UserError(
            f"{own} ranks and {launch.engines} engines on {each} GPUs each take {wanted} GPUs, and here are "
            f"{there}; set launch.ranks, launch.engines and engine.tensor_parallel"
        )


def trainer_command(
    settings: RunConfig, config: Path, overrides: Sequence[str], urls: Sequence[str], *, resume: bool
) -> list[str]:
    """`logra train`, on several ranks by torchrun, told where the engines are."""
    command = [sys.executable, "-m"]
    if settings.launch.ranks > 1:
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(settings.launch.ranks), "-m"]
    command += ["scaled", "train", str(config), *overrides, f"engine.launched=[{', '.join(urls)}]"]
    return [*command, *(["--resume"] if resume else [])]


def trainer_environment(settings: RunConfig) -> dict[str, str]:
    """With GPUs the first of them are the trainer's."""
    count = trainer_gpus(settings)
    return {"CUDA_VISIBLE_DEVICES": visible(range(count))} if count else {}


def trainer_gpus(config: RunConfig) -> int:
    """How many GPUs the trainer has, one a rank."""
    return config.launch.ranks if resolve_device(config.model.device).type == "cuda" else 0


def _watch(
    trainer: subprocess.Popen[bytes], engines: list[EngineProcess], settings: RunConfig, console: Console
) -> int:
    """Wait for the trainer, and start engines again that die meanwhile."""
    restarts = [0] * len(engines)
    while True:
        try:
            return trainer.wait(1.0)
        except subprocess.TimeoutExpired:
            pass
        for number, process in enumerate(engines):
            if not process.died():
                continue
            words = process.last_words()
            if restarts[number] == settings.launch.restarts:
                trainer.terminate()  # it saves
                with suppress(subprocess.TimeoutExpired):
                    trainer.wait(SAVES)
                raise UserError(f"engine {number} died {restarts[number] + 1} times, the last with: {words}")
            restarts[number] += 1
            console.print(f"engine {number} died and is started again: {words}", markup=False)
            process.start()


def _stop_starting(number: int, frame: FrameType | None) -> None:
    raise Interrupted


@contextmanager
def _signals(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)
