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

from logra_ref.projection import Projection, projection_seed
from logra_ref.sync import FactorMessage, SplitWeight, nudge_ties_
from scaled.engine.stream import stream
from scaled.errors import UserError
from scaled.policy_sync.fingerprint import fingerprint, positions
from scaled.policy_sync.message_file import read_message


@dataclass
class InitInfo(WeightTransferInitInfo):
    """``run`` is whose updates are followed, ``folder`` where they are written, and the only place read from."""

    run: str
    folder: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """``factors``: the message of an update in the folder. ``full``: a Hugging Face folder of fp32 weights."""

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
        self._check(message)
        stream(self.model, self._lifted(message), self._subtract)
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
        """All weights, from fp32 safetensors."""
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise UserError(f"{folder} has no safetensors to load weights from")
        shapes = {}
        for path in files:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 — no mapping
                    part = file.get_slice(name)
                    if part.get_dtype() != "F32":
                        raise UserError(f"{name} in {path} is {part.get_dtype()}; an engine starts from fp32 weights")
                    shapes[name] = tuple(part.get_shape())
        stream(self.model, _tensors(files), self._set)
        self.shapes = shapes

    def _check(self, message: FactorMessage) -> None:
        for name, levels in message.levels.items():
            shape, coefficient = self.shapes.get(name), message.coefficients.get(name)
            if shape is None or coefficient is None:
                raise UserError(f"update {message.update} changes {name}, which this model does not have; refused")
            if levels.dtype != torch.int8 or tuple(levels.shape) != (shape[0], message.rank):
                raise UserError(
                    f"the factor of {name} is {levels.dtype} {tuple(levels.shape)}, not int8 {(shape[0], message.rank)}"
                )
            if coefficient.dtype != torch.float32 or tuple(coefficient.shape) != (shape[0],):
                raise UserError(f"the coefficients of {name} are {coefficient.dtype} {tuple(coefficient.shape)}")
            if not torch.isfinite(coefficient).all():
                raise UserError(f"a coefficient of {name} is not finite; refused")
            Projection(message.kind, message.rank, shape[1], 0)  # refuses a rank that the kind does not have

    def _lifted(self, message: FactorMessage) -> Iterator[tuple[str, Tensor]]:
        """c_i (levels_i E) for each matrix: what is subtracted, in fp32, one product and no sum with the weight."""
        for name, levels in message.levels.items():
            seed = projection_seed(message.base_seed, message.update, name)
            projection = Projection(message.kind, message.rank, self.shapes[name][1], seed)
            lifted = projection.lift(levels.to(self.device, torch.float32), scaled=False)
            yield name, lifted.mul_(message.coefficients[name].to(self.device)[:, None])

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
                yield name, file.get_tensor(name)
