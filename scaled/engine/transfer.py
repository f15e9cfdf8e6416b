"""The weight transfer backend ``logra``: an engine that follows its trainer bit for bit.

An fp32 engine holds the trainer's weights. A bf16 engine holds bf16 of them, and the 16 bits below beside them
(``scaled.engine.weights``, where are also the ways to do without, to compare with).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from logra_ref.sync import FactorMessage, redrawn
from logra_ref.update import lifted_rows
from scaled.engine.inbox import Inbox, SharedFolder, Wired, shapes_of
from scaled.engine.stream import stream
from scaled.engine.weights import EngineWeights, Form
from scaled.errors import UserError
from scaled.policy_sync.export import write_part
from scaled.policy_sync.fingerprint import fingerprint, positions
from scaled.policy_sync.message_file import read_message
from scaled.policy_sync.wire import Meeting


@dataclass
class InitInfo(WeightTransferInitInfo):
    """``run`` is whose updates are followed, ``folder`` where they are written, and the only place read from;
    ``form`` is how a bf16 engine holds weights (``Form``).

    With a ``meeting`` (``policy_sync.wire``) there is no such folder, and the trainer sends its files.
    """

    run: str
    form: dict[str, str] = field(default_factory=dict)
    folder: str = ""
    meeting: dict[str, Any] | None = None
    patience: float = 600.0


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """``factors``: the message of an update in the folder. ``full``: a Hugging Face folder of all weights.

    ``files`` are the names and bytes of what the trainer sends, if there is no folder.
    """

    kind: str
    update: int
    digest: str = ""
    model: str = ""
    files: dict[str, int] = field(default_factory=dict)


class FactorTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Redraws A, checks a message before anything is written, applies it; ``version`` is the last update applied."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.run, self.version = "", -1
        self.inbox: Inbox | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.weights = EngineWeights()
        self.digest, self.refusal = "", ""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Raises ``UserError`` for a form that is none, and for a folder or a trainer that is not there."""
        with self._refusing():
            self._follow(init_info)

    def _follow(self, init_info: InitInfo) -> None:
        form = Form(**init_info.form)
        if form != self.weights.form:
            self.weights, self.version = EngineWeights(form), -1  # all weights have to be set anew
        if self.inbox is not None:
            self.inbox.close()
            self.inbox = None
        self.run = init_info.run
        if init_info.meeting is None:
            self.inbox = SharedFolder(Path(init_info.folder))
        else:
            worker, patience = self.parallel_config.rank, init_info.patience
            self.inbox = Wired(Meeting(**init_info.meeting), worker, self.device, patience)

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        with self._refusing():
            self.receive_weights(self.parse_update_info(update_info))
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
        if self.inbox is not None:
            self.inbox.close()
        self.weights.clear()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Raises ``UserError``; for factors before any weight is changed, for all weights until they begin to come."""
        if self.inbox is None:
            raise UserError("this engine follows no trainer; it has to be told where updates come from first")
        if update_info.kind == "full":
            self._load(self.inbox.weights(update_info.files, update_info.model))
            self.version, self.digest = update_info.update, ""
            return
        with self.inbox.factors(update_info.files) as folder:
            self._apply(update_info, folder)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Keep the reason, for which vLLM's answer has "Internal Server Error"."""
        self.refusal = ""
        try:
            yield
        except UserError as error:
            self.refusal = str(error)
            raise

    def _apply(self, update_info: UpdateInfo, folder: Path) -> None:
        if update_info.update == self.version and update_info.digest == self.digest:
            return  # sent again
        if update_info.update != self.version + 1:
            raise UserError(
                f"update {update_info.update} does not follow {self.version}, the last one applied here; send those "
                "between, or full weights"
            )
        message = read_message(folder, update_info.update, run=self.run, digest=update_info.digest)
        try:
            projections = redrawn(message, {name: shape for name, shape in self.shapes.items() if len(shape) == 2})
        except ValueError as error:
            raise UserError(f"update {message.update} is none of this model's: {error}") from error
        self.version, self.digest = -1, ""  # were it to end half way, nothing but all weights could follow
        stream(self.model, self._lifted(message, projections), self.weights.subtract)
        self.version, self.digest = update_info.update, update_info.digest

    def shares(self) -> dict[str, tuple[int, int, int]]:
        """Of each weight, the fingerprint of what this worker has, how many entries that are, and how many there are.

        Shares of all workers add up, modulo 2^64: of a weight that each of two workers has, to twice its fingerprint.
        """
        found = {}
        for name, shape in self.shapes.items():
            held = self._held(name)
            total = sum(int(fingerprint(place, where)) for place, where in held)
            found[name] = (total, sum(place.numel() for place, _ in held), math.prod(shape))
        return found

    def parts(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Of each weight that this worker has a part of, the positions of its entries in the whole and the entries."""
        found = {}
        for name in self.shapes:
            if held := self._held(name):
                where = torch.cat([where.flatten() for _, where in held])
                found[name] = where, torch.cat([place.detach().flatten() for place, _ in held])
        return found

    def _held(self, name: str) -> list[tuple[Tensor, Tensor]]:
        """The places of a weight on this worker, each with the positions of its entries in the whole weight."""
        found = []
        shape = self.shapes[name]
        whole = positions(range(shape[0]), math.prod(shape[1:])).reshape(shape)
        stream(self.model, [(name, whole)], lambda place, where: found.append((place, where.to(place.device))))
        return found

    def _load(self, files: Iterator[Path]) -> None:
        """All weights, from safetensors of fp32 or of what is widened to it, as the trainer does, without a loss."""
        shapes = {}
        for path in files:
            shapes |= shapes_of(path)
            if self.version >= 0:
                self.weights.clear()
                self.version = -1  # whatever ends the loading: nothing but all weights can follow
            stream(self.model, _tensors(path), self.weights.set)
        if not shapes:
            raise UserError("the trainer sends all weights, and none came; nothing was changed")
        self.shapes = shapes

    def _lifted(self, message: FactorMessage, projections: dict[str, Projection]) -> Iterator[tuple[str, Tensor]]:
        """For each matrix what is subtracted, in fp32."""
        for name, projection in projections.items():
            levels, coefficient = message.levels[name].to(self.device), message.coefficients[name].to(self.device)
            yield name, lifted_rows(levels, coefficient, projection)


class WorkerExtension:
    """Methods of vLLM's worker, called by ``collective_rpc``."""

    def logra_state(self) -> str:
        """Version and ``shares``, as JSON."""
        engine = self.weight_transfer_engine
        return json.dumps({"version": engine.version, "shares": engine.shares()})

    def logra_export(self, folder: str) -> str:
        """Write this worker's part of every weight to a file in that folder; its path."""
        return str(write_part(Path(folder) / f"worker-{self.rank}.safetensors", self.weight_transfer_engine.parts()))

    def logra_refusal(self) -> str:
        """Why the last update was refused, or the trainer not followed; nothing if it was not."""
        return self.weight_transfer_engine.refusal

    def logra_forget(self) -> None:
        """vLLM refuses to start an update while another is open, and one whose trainer has gone stays open for ever."""
        self._weight_update_active = False


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 — no mapping
            yield name, file.get_tensor(name).to(torch.float32)
