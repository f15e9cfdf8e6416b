"""``logra bench step``: the bound against counts by hand, the ratios against known seconds, and a real small run."""

import json

import pytest
from typer.testing import CliRunner

from scaled.bench.step import contenders_of, figures, needed_operations
from scaled.cli import app
from scaled.errors import UserError


def test_a_bound_is_the_products_of_one_matrix_counted_by_hand():
    """5 tokens, a matrix of 3 rows and 4 columns, rank 2, and 100 operations that every method has to do."""
    shapes, n = [(3, 4)], 5
    gradient = 2 * n * 3 * 4  # 3·4 sums over 5 tokens
    projected, sketch, update = 2 * n * 2 * 4, 2 * n * 3 * 2, 2 * 3 * 2 * 4  # x Aᵀ, then d·r sums, then U A
    assert needed_operations("frozen", 100, shapes, n) == 100
    assert needed_operations("dense", 100, shapes, n) == 100 + gradient
    assert needed_operations("logra:2", 100, shapes, n) == 100 + projected + sketch + update
    assert needed_operations("lora:2", 100, shapes, n) == 100 + 3 * (projected + sketch)
    assert needed_operations("galore:2", 100, shapes, n) is None


def test_ratios_are_taken_step_by_step_so_that_a_slow_moment_of_the_machine_does_not_count():
    def row(*seconds):
        parts = {"forward and backward": list(seconds), "update": [0.0] * len(seconds)}
        return {"seconds": parts, "operations": 10, "shapes": [(3, 4)], "peak_bytes": 7, "weight_bytes": 5}

    found = figures({"frozen": row(1, 2, 10), "dense": row(2, 4, 20), "logra:2": row(1.5, 3, 15)}, tokens=5)
    assert found["ratio_to_dense"] == {"frozen": 0.5, "dense": 1, "logra:2": 0.75}
    assert found["spread_of_ratio"]["logra:2"] == [0.75, 0.75]
    assert found["seconds"]["dense"] == 4
    assert found["bound"]["dense"] == 1 and found["bound"]["frozen"] == 10 / (10 + 120)


@pytest.mark.parametrize("text", ["adam", "logra", "logra:0", "logra:x", "dense:3", "lora:-1", "galore:"])
def test_what_cannot_be_measured_is_named(text):
    with pytest.raises(UserError, match=f"no method '{text}' can be measured"):
        contenders_of(text)


def test_dense_of_which_the_ratios_are_is_always_measured():
    assert contenders_of("logra:4") == ["frozen", "dense", "logra:4"]


def test_a_real_run_counts_memory_and_products_and_says_what_was_left_out(tiny_model, tmp_path):
    file = tmp_path / "step.json"
    arguments = ["bench", "step", str(tiny_model), "--tokens", "32", "--repeats", "1", "--json", str(file)]
    done = CliRunner().invoke(app, [*arguments, "--methods", "logra:4,apollo:4", "--peers", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "apollo:4 is left out" in done.output
    found = json.loads(file.read_text())
    assert set(found["ratio_to_dense"]) == {"frozen", "dense", "logra:4"}
    for name in found["operations"]:  # the code does what it has to; its norms (UᵀU, AAᵀ) are beyond that
        assert found["operations"][name] >= found["operations_needed"][name] > 0
    assert found["operations"]["dense"] == found["operations_needed"]["dense"]
    peaks = found["peak_bytes"]
    assert found["weight_bytes"]["frozen"] < peaks["frozen"] < peaks["logra:4"] < peaks["dense"]
