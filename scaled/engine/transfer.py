"""The weight transfer backend ``logra``: an engine that follows its trainer bit for bit.

An fp32 engine holds the trainer's weights. A bf16 engine holds bf16 of them, and the 16 bits below beside them
(``logra_ref.sync.SplitWeight``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.platforms import current_platform

from logra_ref.projection import Projection
from logra_ref.sync import FactorMessage, SplitWeight, nudge_ties_, redrawn
from logra_ref.update import lifted_rows
from scaled.engine.stream import stream
from scaled.errors import UserError
from scaled.policy_sync.fingerprint import fingerprint, positions
from scaled.policy_sync.message_file import read_message

WIDENED = ("F32", "BF16", "F16")


@dataclass
class InitInfo(WeightTransferInitInfo):
    """``run`` is whose updates are followed, ``folder`` where they are written, and the only place read from."""

    run: str
    folder: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """``factors``: the message of an update in the folder. ``full``: a Hugging Face folder of all weights."""

    kind: str
    update: int
    digest: str = ""
    model: str = ""


class FactorTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Redraws A, checks a message before anything is written, applies it; ``version`` is the last update applied."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.run, self.folder, self.version = "", Path(), -1
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.low: dict[int, Tensor] = {}  # by the address of a weight's storage
        self.digest, self.refusal = "", ""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.run, self.folder = init_info.run, Path(init_info.folder)
        if not self.folder.is_dir():
            raise UserError(f"{self.folder}, where updates are to be written, is no folder")

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.refusal = ""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except UserError as error:
            self.refusal = str(error)  # vLLM answers "Internal Server Error" and keeps the reason to its log
            raise
        if not current_platform.is_cpu():
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        """CPU kernels compute with packed copies of the weights: pack them again."""
        if not current_platform.is_cpu():
            return
        for module in self.model.modules():
            method = getattr(module, "quant_method", None)
            if method is not None and getattr(module, "weight", None) is not None:
                method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        self.low.clear()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Raises ``UserError`` before any weight is changed."""
        if update_info.kind == "full":
            self._load(Path(update_info.model))
            self.version, self.digest = update_info.update, ""
            return
        if update_info.update == self.version and update_info.digest == self.digest:
            return  # sent again
        if update_info.update != self.version + 1:
            raise UserError(
                f"update {update_info.update} does not follow {self.version}, the last one applied here; send those "
                "between, or full weights"
            )
        message = read_message(self.folder, update_info.update, run=self.run, digest=update_info.digest)
        try:
            projections = redrawn(message, {name: shape for name, shape in self.shapes.items() if len(shape) == 2})
        except ValueError as error:
            raise UserError(f"update {message.update} is none of this model's: {error}") from error
        stream(self.model, self._lifted(message, projections), self._subtract)
        self.version, self.digest = update_info.update, update_info.digest

    def shares(self) -> dict[str, tuple[int, int, int]]:
        """Of each weight, the fingerprint of what this worker has, how many entries that are, and how many there are.

        Shares of all workers add up, modulo 2^64: of a weight that each of two workers has, to twice its fingerprint.
        """
        found = {}
        for name, shape in self.shapes.items():
            total, entries = torch.zeros((), dtype=torch.int64), 0

            def add(place: Tensor, part: Tensor) -> None:
                nonlocal total, entries
                total = total + fingerprint(place, part.to(place.device)).cpu()
                entries += place.numel()

            where = positions(range(shape[0]), math.prod(shape[1:])).reshape(shape)
            stream(self.model, [(name, where)], add)
            found[name] = (int(total), entries, where.numel())
        return found

    def _load(self, folder: Path) -> None:
        """All weights, from safetensors of fp32 or of what is widened to it, as the trainer does, without a loss."""
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise UserError(f"{folder} has no safetensors to load weights from")
        shapes = {}
        for path in files:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 — no mapping
                    part = file.get_slice(name)
                    if part.get_dtype() not in WIDENED:
                        raise UserError(f"{name} in {path} is {part.get_dtype()}, not one of {', '.join(WIDENED)}")
                    shapes[name] = tuple(part.get_shape())
        self.version = -1  # whatever ends the loading: nothing but all weights can follow
        stream(self.model, _tensors(files), self._set)
        self.shapes = shapes

    def _lifted(self, message: FactorMessage, projections: dict[str, Projection]) -> Iterator[tuple[str, Tensor]]:
        """For each matrix what is subtracted, in fp32."""
        for name, projection in projections.items():
            levels, coefficient = message.levels[name].to(self.device), message.coefficients[name].to(self.device)
            yield name, lifted_rows(levels, coefficient, projection)

    def _subtract(self, place: Tensor, part: Tensor) -> None:
        part = part.to(place.device)
        if place.dtype == torch.float32:
            place.sub_(part)
            return
        split = SplitWeight(place, self._low(place))
        self._write(split, split.join().sub_(part))

    def _set(self, place: Tensor, part: Tensor) -> None:
        part = part.to(place.device)
        if place.dtype == torch.float32:
            place.copy_(part)
        else:
            self._write(SplitWeight(place, self._low(place)), part.clone())

    def _write(self, split: SplitWeight, weight: Tensor) -> None:
        nudge_ties_(weight)
        new = SplitWeight.of(weight)
        split.high.copy_(new.high)
        split.low.copy_(new.low)

    def _low(self, place: Tensor) -> Tensor:
        """The low halves of a place: a view of the same form of a tensor that lies beside the weight's storage."""
        storage = place.untyped_storage()
        held = self.low.get(storage.data_ptr())
        if held is None:
            held = torch.zeros(storage.nbytes() // place.element_size(), dtype=torch.int16, device=place.device)
            self.low[storage.data_ptr()] = held
        return held.as_strided(place.size(), place.stride(), place.storage_offset())


class WorkerExtension:
    """Methods of vLLM's worker, called by ``collective_rpc``."""

    def logra_state(self) -> str:
        """Version and ``shares``, as JSON."""
        engine = self.weight_transfer_engine
        return json.dumps({"version": engine.version, "shares": engine.shares()})

    def logra_refusal(self) -> str:
        """Why the last update was refused; nothing if it was not."""
        return self.weight_transfer_engine.refusal


def _tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 — no mapping
                yield name, file.get_tensor(name).to(torch.float32)
