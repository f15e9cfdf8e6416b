from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from scaled.config_file import dump_config, load_config
from scaled.figures import drawn
from scaled.log_rows import ALWAYS, LARGEST_COUNT, SHARES, metrics_trouble
from scaled.metrics import UPDATE_FIELDS, JsonLines
from scaled.plots import evaluation_plots, update_plots
from scaled.report import write_report
from tests.pages import evaluation_row, update_row

NUMBERS = [name for name in UPDATE_FIELDS if name not in ("update", "batch", "method", "skipped")]
EXTREMES = [(1e-320,), (1e308,), (1e-320, 1e308), (0.5, 1e308), (1e-320, 0.5), (1e99, 1e-99), (-1e308, -1e-320)]


# Warnings are errors in these tests.
@pytest.mark.parametrize("values", EXTREMES)
def test_numbers_at_the_ends_of_floating_point_are_drawn_or_left_out_without_a_warning(values):
    for fields in (NUMBERS, ["q", "predicted_kl", "weight_norm", "seconds_train"]):
        rows = [update_row(i + 1, **dict.fromkeys(fields, value)) for i, value in enumerate(values)]
        assert update_plots(rows, 3.0)
    assert evaluation_plots([evaluation_row(i, "greedy", v, interval=[v, v]) for i, v in enumerate(values)])


def test_a_huge_number_beside_ordinary_ones_leaves_them_their_axis():
    def path(rows: list[dict]) -> list[str]:
        svg = next(plot.svg for plot in update_plots(rows, 3.0) if plot.title == "Norm of the sketches")
        return re.findall(r"<text[^>]*>([^<]*)<", svg)

    ordinary = [update_row(1, sketch_norm=2.0), update_row(2, sketch_norm=5.0)]
    assert path([*ordinary, update_row(3, sketch_norm=1e308)]) == path([*ordinary, update_row(3, sketch_norm=math.nan)])


def test_what_an_axis_takes():
    assert [drawn(value) for value in (1.5, -1e99, 0.0, 1e-320, -1e-320)] == [1.5, -1e99, 0, 0, 0]
    assert all(math.isnan(drawn(value)) for value in (math.nan, math.inf, -math.inf, 1e308))


def test_a_log_with_the_largest_and_the_smallest_number_is_read_and_reported(tmp_path):
    (tmp_path / "config.yaml").write_text(dump_config(load_config(Path("smollm2-demo"))))
    for update, value in ((1, 1e-320), (2, 1e308)):
        rest = dict.fromkeys([name for name in NUMBERS if name not in (*ALWAYS, *SHARES)], value)
        JsonLines(tmp_path / "metrics.jsonl").append(update_row(update, **rest))
    assert "<svg" in write_report(tmp_path).read_text()


def test_an_update_whose_number_no_axis_can_tell_from_its_neighbours_is_refused():
    update_plots([update_row(1), update_row(LARGEST_COUNT)], 3.0)
    assert "`update` is" in metrics_trouble(update_row(LARGEST_COUNT + 1))
