"""Whatever a check computes with, its record is JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import torch

from validation.claim import Claim, Comparison, Measurement, Setting
from validation.ledger import measure
from validation.text import explanation, line, table

FIGURE = Comparison("a | b", 1.0, 1.05, 0.1, "why", "by hand", "wrong", 2.0)


def record(comparison: Comparison, **data) -> dict:
    claim = Claim("X1", "a statement", "§9", lambda setting: Measurement([comparison], data=data))
    return json.loads(json.dumps(measure(claim, Setting()).record(), allow_nan=False))


def test_numbers_of_numpy_and_torch_become_pythons():
    found = record(
        replace(FIGURE, measured=np.float64(1.05), expected=np.float32(1), tolerance=torch.tensor(0.25)),
        curve=[np.float32(0.5), (np.int64(3), torch.tensor(2.0))],
    )
    assert found["verdict"] == "holds"
    assert found["comparisons"][0]["fits"] is True
    assert (found["expected"], found["tolerance"]) == (1.0, 0.25)
    assert found["data"] == {"curve": [0.5, [3, 2.0]]}


def test_a_figure_that_is_no_number_fails_and_can_still_be_told():
    for measured in (float("nan"), float("inf"), -float("inf")):
        found = record(replace(FIGURE, measured=measured))
        assert found["verdict"] == "fails"
        assert "X1  fails" in line(found)
        assert "repeat alone" in explanation(found)


def test_a_bar_in_a_text_does_not_cut_a_table():
    rows = table([record(FIGURE)]).splitlines()
    assert "a \\| b" in rows[2]
    assert {row.replace("\\|", "").count("|") for row in rows} == {7}
