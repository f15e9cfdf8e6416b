"""Engine beside trainer: the arithmetic of the comparison by hand-made numbers, and weights out of workers' parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from scaled.errors import UserError
from scaled.policy_sync.compare import bits16, equal_fraction, norm, went
from scaled.policy_sync.export import read_export, write_part


def weights(*numbers: float) -> dict[str, Tensor]:
    return {"a": torch.tensor([numbers[:2]]), "b": torch.tensor(numbers[2:])}


def test_the_way_of_an_engine_is_measured_along_the_trainers_and_beside_it():
    before, after = weights(1, 1, 1), weights(4, 1, 5)  # Δ = (3, 0, 4), ‖Δ‖ = 5
    start = weights(0.5, 2, 0)  # an engine starts where it starts
    assert went(start, weights(3.5, 2, 4), before, after) == (1, 0)
    share, error = went(start, weights(3.5, 2, 0), before, after)  # Δ = (3, 0, 0)
    assert (share, error) == pytest.approx((9 / 25, 4 / 5))
    share, error = went(start, weights(3.5, 12, 4), before, after)  # noise that is orthogonal: all of the way, and off
    assert (share, error) == pytest.approx((1, 2))
    assert went(start, start, before, after) == (0, 1)
    with pytest.raises(ZeroDivisionError):
        went(start, start, before, before)


def test_ways_of_bf16_weights_are_summed_in_fp64():
    before = {"a": torch.ones(300, dtype=torch.bfloat16)}
    after = {"a": torch.full((300,), 1 + 2**-7, dtype=torch.bfloat16)}
    assert went(before, after, before, after) == (1, 0)
    assert norm(before) == pytest.approx(300**0.5, rel=1e-12)
    assert norm(before, after) == pytest.approx(300**0.5 / 128, rel=1e-12)
    assert norm(weights(0, 3, 4)) == 5


def test_entries_are_equal_by_their_bits():
    one = torch.tensor([1.0, -0.0, float("nan"), 3.0], dtype=torch.bfloat16)
    other = torch.tensor([1.0, 0.0, float("nan"), 3.02], dtype=torch.bfloat16)  # 3.02 is another number, 3.015625
    more = torch.ones(4, 3, dtype=torch.bfloat16).T  # not contiguous
    assert equal_fraction({"a": bits16(one), "b": bits16(more)}, {"a": bits16(other), "b": bits16(more)}) == 14 / 16
    assert bits16(torch.tensor([-1.0], dtype=torch.bfloat16)).tolist() == [0xBF80]


SHAPES = {"q": (4, 3), "norm": (2,)}


def exported(folder: Path, *workers: dict[str, tuple[list[int], list[float]]], dtype=torch.bfloat16) -> list[Path]:
    return [
        write_part(
            folder / f"{number}.safetensors",
            {name: (torch.tensor(where), torch.tensor(found, dtype=dtype)) for name, (where, found) in parts.items()},
        )
        for number, parts in enumerate(workers)
    ]


TOP = {"q": ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]), "norm": ([0, 1], [7, 8])}
REST = {"q": ([11, 10, 9, 8, 7, 6], [11, 10, 9, 8, 7, 6]), "norm": ([1, 0], [8, 7])}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_of_all_workers_are_put_where_they_belong(tmp_path, dtype):
    found = read_export(exported(tmp_path, TOP, REST | {"more": ([5], [0])}, dtype=dtype), SHAPES)
    assert found.keys() == SHAPES.keys()
    assert torch.equal(found["q"], torch.arange(12, dtype=dtype).reshape(4, 3))
    assert torch.equal(found["norm"], torch.tensor([7, 8], dtype=dtype))


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        ([TOP], "lack 6 of the 12 entries of q"),
        ([TOP, {"q": (REST["q"][0][1:], REST["q"][1][1:])}], "lack 1 of the 12 entries of q"),
        ([{"q": TOP["q"]}, {"q": REST["q"]}], "lack 2 of the 2 entries of norm"),
        ([TOP, REST | {"norm": ([0, 1], [7, 9])}], "disagree about norm"),
        ([TOP, REST | {"q": ([*REST["q"][0], 12], [*REST["q"][1], 0])}], "other entries of q than those of its 12"),
        ([TOP, REST | {"q": ([-1], [0])}], "other entries of q than those of its 12"),
        ([TOP, REST | {"q": ([6, 7], [6])}], "other entries of q than those of its 12"),
    ],
)
def test_weights_that_are_not_whole_are_refused(tmp_path, workers, said):
    with pytest.raises(UserError, match=said):
        read_export(exported(tmp_path, *workers), SHAPES)


def test_workers_of_other_dtypes_files_that_are_none_and_folders_that_are_not_there_are_refused(tmp_path):
    (first,) = exported(tmp_path, TOP)
    (tmp_path / "other").mkdir()
    (second,) = exported(tmp_path / "other", REST, dtype=torch.float32)
    with pytest.raises(UserError, match="disagree about"):
        read_export([first, second], SHAPES)
    second.write_bytes(first.read_bytes()[:-1])
    for path in (second, tmp_path / "none"):
        with pytest.raises(UserError, match="cannot be read as a part of an engine's weights"):
            read_export([first, path], SHAPES)
    with pytest.raises(UserError, match="cannot be written"):
        exported(tmp_path / "missing", TOP)
