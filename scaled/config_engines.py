"""The settings of vLLM engines: those that a trainer asks, and those that `logra launch` starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from scaled.engine.weights import Form, LowHalves, Rounding
from scaled.section import Count, CountOrZero, LocalPath, Positive, Section, Text


class EngineConfig(Section):
    """The engines that write responses, for `rollout.backend: vllm`."""

    urls: tuple[Text, ...] = ()
    """Where they are, such as `http://127.0.0.1:8000`."""
    launched: Annotated[tuple[Text, ...], Field(exclude=True)] = ()
    """Those that `logra launch` has started, which says so to the trainer; not saved with the run."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What they compute with. A bf16 engine keeps the other 16 bits of the trainer's weights beside them."""
    rounding: Rounding = "exact"
    """How a bf16 engine takes an update. `naive` loses most of it, `stochastic` blurs it: only to compare with."""
    low_halves: LowHalves = "device"
    """Where a bf16 engine keeps the other 16 bits: beside its weights, or in the memory of its host."""
    tensor_parallel: Count = 1
    """Workers that share an engine's weights."""
    max_model_len: Count | None = None
    """The tokens of the longest prompt and response together; the model's own limit if not given."""
    in_flight: Count = 64
    """Requests to one engine at a time."""
    patience: Positive = 600.0
    """Seconds after which an engine that does not answer is taken for dead; no response may take longer."""
    folder: LocalPath | None = None
    """Where updates are written for them, `/dev/shm` for one; the run's folder if not given."""
    transport: Literal["folder", "broadcast"] = "folder"
    """How updates come to engines: they read them in that folder, or are sent them (by NCCL from a GPU, or gloo)."""
    meet_at: Text | None = None
    """An address of the trainer's machine, where engines come to be sent updates (`transport: broadcast`). If not
    given, that by which the machine reaches the engine."""
    verify_every: CountOrZero = 10
    """Compare the bits of all weights with the engines' after every so many updates (0: never)."""
    log_prob_limit: Positive = 0.1
    """The mean distance of log-probabilities, engine against trainer, above which the run stops (nats a token)."""
    other_version: Literal["refuse", "weight"] = "refuse"
    """What to do with a response from other weights than the last: stop, or leave it to its importance weights."""

    @field_validator("urls", "launched")
    @classmethod
    def _different(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(urls)) < len(urls):
            raise ValueError("names an engine twice; each has one trainer's rank to follow")
        for url in urls:
            parts = urlsplit(url)  # which raises ValueError for a port that is none
            whole = not (parts.path.strip("/") or parts.query or parts.fragment or parts.username)
            known = parts.scheme in ("http", "https") and parts.hostname and 0 < (parts.port or 80) < 2**16
            if not (whole and known):
                raise ValueError(f"has {url!r}, which is no address such as http://127.0.0.1:8000, with nothing behind")
        return urls

    @field_validator("meet_at")
    @classmethod
    def _one_address(cls, host: str | None) -> str | None:
        if host in ("0.0.0.0", "::"):
            raise ValueError("stands for all addresses; name the one by which engines reach this machine, or none")
        return host

    @property
    def form(self) -> Form:
        """How a bf16 engine holds its weights."""
        return Form(self.rounding, self.low_halves)


class LaunchConfig(Section):
    """What `logra launch` starts on this machine. With GPUs, ranks have the first of them and engines the next."""

    ranks: Annotated[int, Field(gt=0, le=1024)] = 1
    """Trainers that share the model."""
    engines: Annotated[int, Field(gt=0, le=1024)] = 1
    """Engines."""
    host: Text = "127.0.0.1"
    """The address that engines listen on; others than the loopback address are reached by whoever has the token."""
    python: LocalPath = Path(".venv-engine/bin/python")
    """The Python of the environment that has vLLM and this project (`make engine`)."""
    restarts: CountOrZero = 3
    """How often an engine that has died is started again."""
    patience: Positive = 600.0
    """Seconds that an engine may take to start, or to come back."""
