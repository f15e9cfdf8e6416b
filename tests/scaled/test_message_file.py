"""The files of an update's message: whole or refused, and refused for the right reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from logra_ref.sync import FactorMessage
from scaled.errors import UserError
from scaled.policy_sync.message_file import Origin, joint_digest, message_path, read_message, write_message

NAMES = ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight")


def message(rows: int = 5, update: int = 3, seed: int = 0) -> FactorMessage:
    generator = torch.Generator().manual_seed(seed)
    return FactorMessage(
        update,
        11,
        "rademacher",
        4,
        {name: torch.randint(-127, 128, (rows, 4), dtype=torch.int8, generator=generator) for name in NAMES},
        {name: torch.rand(rows, generator=generator) for name in NAMES},
    )


def part(whole: FactorMessage, rows: slice) -> FactorMessage:
    return replace(
        whole,
        levels={name: x[rows] for name, x in whole.levels.items()},
        coefficients={name: x[rows] for name, x in whole.coefficients.items()},
    )


def rewritten(path: Path, header: dict | None = None, **tensors: torch.Tensor) -> None:
    """The file with parts of its header or some tensors changed, as safetensors writes it."""
    with safe_open(path, "pt") as file:
        metadata, held = json.loads(file.metadata()["logra"]), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    save_file(held | tensors, path, metadata={"logra": json.dumps(metadata | (header or {}))})


@pytest.fixture
def sent(tmp_path) -> tuple[Path, Path, str]:
    """A folder with a message of one part, the part, and the digest that is announced."""
    digest = write_message(tmp_path, message(), Origin("mine"))
    return tmp_path, message_path(tmp_path, 3, 0, 1), joint_digest([digest])


def test_what_was_written_is_read_by_name_with_dtype_and_digest(sent):
    folder, path, digest = sent
    found = read_message(folder, 3, run="mine", digest=digest)
    assert found.digest() == message().digest()
    assert list(folder.iterdir()) == [path]


def test_rows_of_several_ranks_even_of_none_are_put_one_below_the_other(tmp_path):
    whole, digests = message(7), []
    for number, rows in enumerate((slice(0, 3), slice(3, 7), slice(7, 7))):
        digests.append(write_message(tmp_path, part(whole, rows), Origin("mine", number, 3)))
    assert read_message(tmp_path, 3, run="mine", digest=joint_digest(digests)).digest() == whole.digest()
    message_path(tmp_path, 3, 1, 3).unlink()
    with pytest.raises(UserError, match=r"part-2-of-3\.safetensors cannot be read"):
        read_message(tmp_path, 3, run="mine", digest=joint_digest(digests))


def test_any_flipped_bit_and_any_cut_of_the_file_is_refused(sent):
    folder, path, digest = sent
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(UserError, match=r"update-00000003|update 3"):
            read_message(folder, 3, run="mine", digest=digest)
    for length in range(0, len(whole), 11):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="send it again"):
            read_message(folder, 3, run="mine", digest=digest)
    path.write_bytes(whole)
    read_message(folder, 3, run="mine", digest=digest)


def test_a_message_of_another_run_another_content_or_no_message_is_told_apart(sent):
    folder, path, digest = sent
    with pytest.raises(UserError, match="is of run 'mine', and this engine follows run 'other'"):
        read_message(folder, 3, run="other", digest=digest)
    with pytest.raises(UserError, match="are not those that were announced"):
        read_message(folder, 3, run="mine", digest=joint_digest(["another"]))
    with pytest.raises(UserError, match="has 0 first parts of the factors of update 4"):
        read_message(folder, 4, run="mine", digest=digest)
    rewritten(path, {"update": 4})
    with pytest.raises(UserError, match="was altered"):
        read_message(folder, 3, run="mine", digest=digest)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "another/2"}, "has no header of logra-factors/1"),
        ({"more": 1}, "has no header of logra-factors/1"),
        ({"rank": "4"}, "rank: Input should be a valid integer"),
        ({"base_seed": 12}, "was altered"),
        ({"kind": "gaussian"}, "was altered"),
        ({"kind": "Rademacher"}, "kind: Input should be"),
        ({"rank": 5}, "no int8 factor with 5 columns"),
    ],
)
def test_a_changed_header_is_refused(sent, change, said):
    folder, path, digest = sent
    rewritten(path, change)
    with pytest.raises(UserError, match=said):
        read_message(folder, 3, run="mine", digest=digest)


def test_a_tensor_that_no_update_has_is_refused(sent):
    folder, path, digest = sent
    rewritten(path, **{"code|x": torch.zeros(1)})
    with pytest.raises(UserError, match=r"holds a tensor 'code\|x', which no update has"):
        read_message(folder, 3, run="mine", digest=digest)


def test_a_link_to_a_file_elsewhere_is_refused(sent, tmp_path_factory):
    folder, path, digest = sent
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "factors"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(UserError, match="is a link; refused"):
        read_message(folder, 3, run="mine", digest=digest)


def test_a_folder_that_cannot_be_written_is_one_error_and_nothing_is_left(tmp_path):
    with pytest.raises(UserError, match="the factors of update 3 cannot be written"):
        write_message(tmp_path / "missing", message(), Origin("mine"))
    assert list(tmp_path.iterdir()) == []
