"""Reading back with the standard library's json is the oracle; a crash is played by cutting bytes off the file."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scaled.errors import UserError
from scaled.log_rows import LATER, metrics_log, metrics_trouble, samples_log
from scaled.metrics import UPDATE_FIELDS, JsonLines, peak_bytes


@pytest.fixture
def log(tmp_path: Path) -> JsonLines:
    return JsonLines(tmp_path / "metrics.jsonl")


def write(log: JsonLines, *batches: int) -> None:
    for batch in batches:
        log.append({"batch": batch, "text": f"row {batch}"})


def test_a_run_that_has_not_begun_has_no_rows(log):
    assert log.rows() == []
    log.rewind(3)
    assert not log.path.exists()


def test_numbers_that_json_lacks_stay_strict_json_and_are_not_lost(log):
    log.append({"q": math.nan, "interval": (-math.inf, np.float64("inf")), "fine": 0.1})
    row = json.loads(log.path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no strict JSON"))
    assert row == {"q": "NaN", "interval": ["-Infinity", "Infinity"], "fine": 0.1}
    assert math.isnan(float(row["q"]))
    assert float(row["interval"][0]) == -math.inf


text_or_number = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)


@given(st.dictionaries(st.text(), text_or_number | st.lists(text_or_number) | st.dictionaries(st.text(), st.text())))
def test_any_row_comes_back_equal_and_fills_one_line(tmp_path_factory, row):
    log = JsonLines(tmp_path_factory.mktemp("log") / "rows.jsonl")
    log.append(row)
    log.append(row)
    assert log.rows() == [row, row]
    assert log.path.read_bytes().count(b"\n") == 2


def test_a_text_with_other_line_ends_stays_one_row(log):
    log.append({"batch": 1, "text": "a\nb\r\nc\u2028d\x85e"})
    assert log.rows()[0]["text"] == "a\nb\r\nc\u2028d\x85e"
    log.path.write_text('{"batch": 1, "text": "a\u2028b"}\n', encoding="utf-8")
    assert log.rows() == [{"batch": 1, "text": "a\u2028b"}]


def test_what_json_cannot_hold_is_named_and_leaves_the_file_alone(log):
    write(log, 1)
    before = log.path.read_bytes()
    with pytest.raises(TypeError, match=r"row\.samples\[1\]\.reward is a Tensor"):
        log.append({"samples": [{}, {"reward": torch.tensor(1.0)}]})
    assert log.path.read_bytes() == before


@pytest.mark.parametrize("lost", range(1, 20))
def test_a_torn_last_line_is_left_out_with_a_note_and_the_next_row_does_not_grow_onto_it(log, caplog, lost):
    write(log, 1, 2)
    whole = log.path.read_bytes()
    log.path.write_bytes(whole[: -1 - lost])
    assert [row["batch"] for row in log.rows()] == [1]
    assert "left out line 2" in caplog.text
    write(log, 2)
    assert log.path.read_bytes() == whole


def test_a_last_row_that_lacks_only_its_newline_counts(log):
    write(log, 1, 2)
    log.path.write_bytes(log.path.read_bytes()[:-1])
    assert [row["batch"] for row in log.rows()] == [1, 2]
    write(log, 3)
    assert [row["batch"] for row in log.rows()] == [1, 2, 3]


@pytest.mark.parametrize("bad", ["", "{", "[1]", "3", '{"q": NaN}', '{"q": Infinity}', "\x00\x00", "[" * 100_000])
def test_a_broken_line_that_is_not_a_torn_last_one_is_an_error_with_its_number(log, bad):
    write(log, 1)
    with log.path.open("a") as file:
        file.write(bad + "\n")
    for use in (log.rows, lambda: log.rewind(0)):
        with pytest.raises(UserError, match=r"metrics\.jsonl, line 2"):
            use()
    write(log, 3)
    with pytest.raises(UserError, match="line 2"):
        log.rows()


def test_bytes_that_are_no_text_are_an_error_with_their_line(log):
    log.path.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(UserError, match="line 1"):
        log.rows()


def test_rewinding_keeps_every_row_of_the_checkpoint_byte_for_byte_and_no_later_one(log):
    # A skipped batch has the number of the update that it would have been, so `update` alone cannot tell.
    rows = [
        {"batch": 0, "update": 0, "eval": "greedy"},
        {"batch": 1, "update": 1, "skipped": None},
        {"batch": 2, "update": 2, "skipped": "no signal"},
        {"batch": 3, "update": 2, "skipped": None},
        {"batch": 3, "update": 2, "eval": "greedy"},
        {"batch": 4, "update": 3, "skipped": "no signal"},
    ]
    log.path.write_text("".join(f"{json.dumps(row, separators=(',', ':'))}\n" for row in rows))
    before = log.path.read_text().splitlines()
    log.rewind(3)
    assert log.path.read_text().splitlines() == before[:5]
    assert [path.name for path in log.path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_row_without_a_batch_is_an_error_before_anything_is_dropped(log):
    write(log, 1, 2)
    log.append({"update": 3})
    before = log.path.read_bytes()
    with pytest.raises(UserError, match=r"line 3.*batch"):
        log.rewind(1)
    assert log.path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "trouble"),
    [
        ({"reward": None, "update": "1"}, "line 2: `update` is '1', not a whole number"),
        ({"batch": -1}, "line 2: `batch` is -1"),
        ({"seconds": None}, "line 2: `seconds` is None, not a number"),
        ({"reward": 10**400}, "line 2: `reward` is 1000"),
        ({"q": []}, r"line 2: `q` is \[\], not null or a number"),
        ({"skipped": 3}, "line 2: `skipped` is 3, not a text"),
        ({"eval": "greedy"}, "line 2: the row has no `problems`"),
    ],
)
def test_a_row_that_a_hand_has_changed_is_named_by_file_line_and_field(tmp_path, change, trouble):
    numbers = dict.fromkeys(UPDATE_FIELDS, 0.5) | {"update": 1, "batch": 1, "method": "logra", "skipped": None}
    JsonLines(tmp_path / "metrics.jsonl").append(numbers)
    assert metrics_log(tmp_path).rows() == [numbers]
    JsonLines(tmp_path / "metrics.jsonl").append(numbers | change)
    for use in (metrics_log(tmp_path).rows, lambda: metrics_log(tmp_path).rewind(0)):
        with pytest.raises(UserError, match=trouble):
            use()
    for field in UPDATE_FIELDS:
        trouble = metrics_trouble({name: value for name, value in numbers.items() if name != field})
        assert bool(trouble) == (field not in LATER), field


def test_a_log_that_is_a_folder_is_an_error(tmp_path):
    (tmp_path / "samples.jsonl").mkdir()
    with pytest.raises(UserError, match=r"samples\.jsonl is no ordinary file"):
        samples_log(tmp_path).rows()


def test_a_disk_that_fills_in_the_middle_of_a_row_leaves_the_rows_before_it(tmp_path):
    script = """
import resource, sys
from pathlib import Path
from scaled.metrics import JsonLines
from scaled.errors import UserError
log = JsonLines(Path(sys.argv[1]))
log.append({"batch": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (40, 40))
try:
    log.append({"batch": 2, "text": "x" * 100})
except UserError as error:
    print(error)
"""
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
    assert str(path) in done.stdout
    assert "resume" in done.stdout
    assert path.read_text() == '{"batch": 1}\n'


def test_peak_memory_is_that_of_the_process_and_not_inherited_from_a_large_parent():
    """``ru_maxrss`` of a child starts at what its parent held; a measurement in a subprocess must not."""
    ballast = np.ones(2**27)  # 1 GiB
    script = "import torch; from scaled.metrics import peak_bytes as p; d = torch.device('cpu'); a = p(d)\n"
    script += "x = torch.ones(2**25); b = p(d); del x; print(a, b, p(d))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    before, during, after = map(int, done.stdout.split())
    own = peak_bytes(torch.device("cpu"))
    assert before < ballast.nbytes < own
    assert during - before == pytest.approx(2**27, rel=0.1)
    assert after == pytest.approx(during, rel=0.01)
