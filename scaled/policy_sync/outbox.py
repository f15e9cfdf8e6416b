"""What engines are brought up to date with: all weights as they were after some update, and the updates since.

Any engine catches up from here, one that has just been started too. The base is the model as it was loaded, then the
newest checkpoint; a run that saves none for long writes all weights in between.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from logra_ref.sync import FactorMessage
from scaled.engine.weights import EXACT, Form
from scaled.errors import UserError
from scaled.files import discard
from scaled.policy_sync.client import EngineClient
from scaled.policy_sync.message_file import Origin, joint_digest, message_path, write_message
from scaled.ranks import Ranks

MOST_KEPT = 64  # updates since the base
FILE_BYTES = 2**31  # of weights that are gathered before they are written


class Outbox:
    """A folder of updates that all ranks write to and all engines read. Ranks have to make the same calls."""

    def __init__(self, parent: Path, update: int, base: Path, ranks: Ranks, form: Form = EXACT) -> None:
        """``base`` is a folder of safetensors with all weights after ``update``. The outbox is a new one in ``parent``.
        ``form`` is how bf16 engines are to hold their weights.

        Raises ``UserError`` if it cannot be made.
        """
        self.ranks, self.form = ranks, form
        self.base, self.base_update, self.update = base, update, update
        self._digests: dict[int, str] = {}
        self.folder = ranks.on_first(lambda: _new_folder(parent))
        self.run = self.folder.name

    def add_factors(self, message: FactorMessage) -> int:
        """Write an update, each rank its rows; the bytes of all of them."""
        if message.update != self.update + 1:
            raise RuntimeError(f"update {message.update} does not follow {self.update}")
        with self.ranks.together():
            digest = write_message(self.folder, message, Origin(self.run, self.ranks.rank, self.ranks.world))
            size = self._part(message.update, self.ranks.rank).stat().st_size
        parts = self.ranks.gather((digest, size))
        self.update = message.update
        self._digests[self.update] = joint_digest([digest for digest, _ in parts])
        return sum(size for _, size in parts)

    def add_full(self, update: int, weights: Iterable[tuple[str, Tensor]]) -> int:
        """Write all weights as they are after ``update``, by the first rank; their bytes."""
        target = self.folder / f"weights-{update:08d}"
        size = write_weights(target, weights, self.ranks)
        self.update = update
        self.rebase(update, target)
        return size

    @property
    def full(self) -> bool:
        """Whether so many updates were kept that all weights are wanted."""
        return self.update - self.base_update >= MOST_KEPT

    def rebase(self, update: int, model: Path) -> None:
        """From now on engines that have nothing start from the weights in ``model``, those after ``update``."""
        before, self.base, self.base_update = self.base, model, update
        if self.ranks.first and before.parent == self.folder and before != model:
            discard(before)

    def prune(self) -> None:
        """Remove the updates that are in the base; once all engines have them."""
        for old in [number for number in self._digests if number <= self.base_update]:
            del self._digests[old]
            self._part(old, self.ranks.rank).unlink(missing_ok=True)

    def bring_up(self, client: EngineClient) -> None:
        """Give an engine what it lacks. Raises as the client does."""
        held = self._held(client.version())
        if held is None or not client.follows:
            client.follow(self.run, self.folder, self.form)
        if held is None:
            client.send_full(self.base_update, self.base, self.version(self.base_update))
            held = self.base_update
        for update in range(held + 1, self.update + 1):
            client.send_factors(update, self._digests[update], self.version(update))

    def version(self, update: int) -> str:
        """What engines and responses say of the weights after ``update``: those of this process alone."""
        return f"{self.run}/{update}"

    def _held(self, version: str) -> int | None:
        """The update that an engine has, if it can go on from there."""
        run, _, update = version.rpartition("/")
        if run != self.run or not update.isdecimal():
            return None
        missing = range(int(update) + 1, self.update + 1)
        return int(update) if all(number in self._digests for number in missing) else None

    def _part(self, update: int, rank: int) -> Path:
        return message_path(self.folder, update, rank, self.ranks.world)


def write_weights(folder: Path, weights: Iterable[tuple[str, Tensor]], ranks: Ranks) -> int:
    """Make a folder of safetensors, some weights a file, by the first rank; the bytes of all.

    Every rank has to take part, as ``weights`` are gathered one by one. Raises ``UserError`` where there is no room.
    """
    trouble: Exception | None = None
    pending: dict[str, Tensor] = {}
    size, written = 0, 0

    def write() -> None:
        nonlocal trouble
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            save_file(pending, folder / f"{size:016d}.safetensors")
        except (OSError, SafetensorError) as error:
            trouble = error  # raised once no other rank waits for this one
        pending.clear()

    for name, weight in weights:
        size += weight.numel() * weight.element_size()
        if ranks.first and trouble is None:
            pending[name] = weight.cpu().contiguous()
            if size - written >= FILE_BYTES:
                write()
                written = size
    with ranks.together():
        if pending:
            write()
        if trouble:
            discard(folder)
            raise UserError(f"all weights cannot be written to {folder}: {trouble}; make room there") from trouble
    return size


def _new_folder(parent: Path) -> Path:
    """A folder for its owner alone, by a name that no other run has."""
    folder = parent / uuid.uuid4().hex[:12]
    try:
        folder.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise UserError(
            f"{folder}, where engines find their updates, cannot be made: {error.strerror}; set engine.folder"
        ) from error
    return folder
