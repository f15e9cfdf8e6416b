"""DAPO-Math-7.5K from small files of the published schema."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from scaled.data import load_problems
from scaled.datasets import sources
from scaled.datasets.mathematics import dapo_math
from scaled.errors import UserError

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
QUIET = Console(quiet=True)

# The schema of BytedTsinghua-SIA/DAPO-Math-17k.
DAPO_SCHEMA = arrow.schema(
    {
        "data_source": arrow.string(),
        "prompt": arrow.list_(arrow.struct({"content": arrow.string(), "role": arrow.string()})),
        "ability": arrow.string(),
        "reward_model": arrow.struct({"ground_truth": arrow.string(), "style": arrow.string()}),
        "extra_info": arrow.struct({"index": arrow.string()}),
    }
)


def dapo(text: str, answer: object = "34", *more: dict) -> dict:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": text, "role": "user"}, *more],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
    }


def jsonl(path: Path, rows: list) -> Path:
    path.write_bytes(
        b"".join(json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n" for row in rows)
    )
    return path


def as_parquet(path: Path, rows: list[dict], schema: object = DAPO_SCHEMA, **options: object) -> Path:
    parquet.write_table(arrow.Table.from_pylist(rows, schema), path, **options)
    return path


def texts(path: Path) -> list[str]:
    return [problem.messages[0]["content"] for problem in load_problems(path)]


@pytest.mark.parametrize("write", [jsonl, as_parquet])
def test_the_first_of_equal_prompts_stays_in_the_order_of_the_source(tmp_path: Path, write):
    name = "a.parquet" if write is as_parquet else "a.jsonl"
    source = write(tmp_path / name, [dapo(text, answer) for text, answer in zip("cabcbdae", "12345678", strict=True)])
    dapo_math(tmp_path / "out.jsonl", str(source), QUIET, count=4)
    found = load_problems(tmp_path / "out.jsonl")
    assert [(p.messages[0]["content"], p.answer) for p in found] == [("c", "1"), ("a", "2"), ("b", "3"), ("d", "6")]
    assert {(p.verifier, p.source) for p in found} == {("math", "dapo-math")}
    assert [p.id for p in found] == ["dapo-math/0", "dapo-math/1", "dapo-math/2", "dapo-math/5"]


def test_the_key_is_the_first_message_alone_and_its_every_character(tmp_path: Path):
    later = {"content": "Think.", "role": "user"}
    rows = [dapo("a"), dapo("a", "34", later), dapo("a "), dapo("A"), dapo("é"), dapo("e\u0301")]
    dapo_math(tmp_path / "out.jsonl", str(jsonl(tmp_path / "a.jsonl", rows)), QUIET, count=5)
    assert texts(tmp_path / "out.jsonl") == ["a", "a ", "A", "é", "e\u0301"]


@given(st.lists(st.tuples(st.text(min_size=1, max_size=3), st.integers(0, 9)), min_size=1, max_size=30))
@example([("x\u2028y\u0085\r", 1), ("x\u2028y\u0085\r", 2)])
def test_any_source_gives_what_a_dictionary_of_its_prompts_gives(tmp_path_factory, pairs):
    folder = tmp_path_factory.getbasetemp()
    expected = {}
    for text, answer in pairs:
        expected.setdefault(text, str(answer))
    source = jsonl(folder / "any.jsonl", [dapo(text, answer) for text, answer in pairs])
    dapo_math(folder / "any-out.jsonl", str(source), QUIET, count=len(expected))
    found = load_problems(folder / "any-out.jsonl")
    assert [(p.messages[0]["content"], p.answer) for p in found] == list(expected.items())


def test_no_more_of_the_source_is_read_than_is_needed(tmp_path: Path, capsys):
    source = jsonl(tmp_path / "a.jsonl", [dapo("a"), dapo("a"), dapo("b")])
    source.write_bytes(source.read_bytes() + b"no JSON\n" * 50)
    dapo_math(tmp_path / "out.jsonl", str(source), QUIET, count=2)
    assert capsys.readouterr().err == ""
    assert texts(tmp_path / "out.jsonl") == ["a", "b"]


def test_the_files_of_a_folder_are_one_source_in_the_order_of_their_names(tmp_path: Path):
    folder = tmp_path / "source"
    folder.mkdir()
    jsonl(folder / "b.jsonl", [dapo("3"), dapo("1")])
    as_parquet(folder / "a.parquet", [dapo("1"), dapo("2")])
    (folder / "README.md").write_text("no rows")
    dapo_math(tmp_path / "out.jsonl", str(folder), QUIET, count=3)
    assert texts(tmp_path / "out.jsonl") == ["1", "2", "3"]
    assert [p.id for p in load_problems(tmp_path / "out.jsonl")] == ["dapo-math/0", "dapo-math/1", "dapo-math/2"]


HOSTILE = {
    "no JSON": "not valid JSON",
    '"text"': "not an object",
    '{"reward_model": {"ground_truth": "1"}}': "`messages` is missing",
    '{"prompt": [], "reward_model": {"ground_truth": "1"}}': "`messages` is []",
    '{"prompt": "text", "reward_model": {"ground_truth": "1"}}': "`messages` is 'text'",
    '{"prompt": [{"role": "user", "content": "x"}]}': "`reward_model` is None",
    '{"prompt": [{"role": "user", "content": "x"}], "reward_model": {}}': "`reward_model.ground_truth` is missing",
    json.dumps(dapo("x", None)): "`reward_model.ground_truth` is missing",
    json.dumps(dapo("x", " ")): "`answer` is ' '",
    json.dumps(dapo("x", ["1"])): "`answer` is ['1']",
    json.dumps(dapo("x", True)): "`answer` is True",
    json.dumps(dapo("\ud800x")): "half of a surrogate pair",
    "[" * 100_000: "not valid JSON",
}


@pytest.mark.parametrize(("line", "reason"), HOSTILE.items(), ids=HOSTILE.values())
def test_a_bad_row_is_told_with_its_place_and_stops_nothing(tmp_path: Path, capsys, line: str, reason: str):
    source = jsonl(tmp_path / "a.jsonl", [dapo("a"), dapo("b")])
    first, second = source.read_bytes().splitlines(keepends=True)
    source.write_bytes(first + line.encode() + b"\n\n" + second)
    dapo_math(tmp_path / "out.jsonl", str(source), QUIET, count=2)
    assert texts(tmp_path / "out.jsonl") == ["a", "b"]
    said = capsys.readouterr().err
    assert "left out: 1" in said
    assert f"{source}:2: " in said and reason in said


def test_a_bad_row_does_not_take_its_prompt_from_a_later_good_one(tmp_path: Path):
    source = jsonl(tmp_path / "a.jsonl", [dapo("a", None), dapo("b"), dapo("a", 7), dapo("c", 2.5)])
    dapo_math(tmp_path / "out.jsonl", str(source), QUIET, count=3)
    assert [(p.messages[0]["content"], p.answer) for p in load_problems(tmp_path / "out.jsonl")] == [
        ("b", "34"),
        ("a", "7"),
        ("c", "2.5"),
    ]


def test_a_null_and_bytes_that_are_no_text_in_a_parquet_file_are_faults_of_their_rows(tmp_path: Path, capsys):
    rows = [dapo("a"), dapo("b") | {"prompt": None}, dapo("c", None), dapo("QQ"), dapo("e")]
    source = as_parquet(tmp_path / "a.parquet", rows, use_dictionary=False, compression="none")
    source.write_bytes(source.read_bytes().replace(b"QQ", b"\xff\xfe"))
    dapo_math(tmp_path / "out.jsonl", str(source), QUIET, count=2)
    assert texts(tmp_path / "out.jsonl") == ["a", "e"]
    said = capsys.readouterr().err
    for place, reason in ((2, "`messages` is missing"), (3, "ground_truth` is missing"), (4, "is not UTF-8")):
        assert f"{source}, row {place}: " in said and reason in said


def test_only_the_first_twenty_bad_rows_are_shown_and_all_are_counted(tmp_path: Path, capsys):
    dapo_math(tmp_path / "out.jsonl", str(jsonl(tmp_path / "a.jsonl", [{}] * 33 + [dapo("a")])), QUIET, count=1)
    lines = capsys.readouterr().err.splitlines()
    assert "left out: 33" in lines[0]
    assert len(lines) == 22 and lines[-1] == "… and 13 more"


def test_too_few_unique_prompts_are_an_error_that_names_the_shortfall_and_leaves_the_old_file(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    source = jsonl(tmp_path / "a.jsonl", [dapo("a"), dapo("b"), dapo("a"), {}])
    with pytest.raises(
        UserError, match=r"2 unique prompts in 4 rows, and 7,500 are needed: 7,498 are missing"
    ) as caught:
        dapo_math(out, str(source), QUIET)
    assert f"{source}:4: " in str(caught.value)
    assert out.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out.jsonl"]


def test_a_truncated_parquet_file_is_named_and_nothing_is_written(tmp_path: Path):
    source = as_parquet(tmp_path / "a.parquet", [dapo(str(number)) for number in range(2000)])
    whole = source.read_bytes()
    source.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"a\.parquet cannot be read after row 0: .*download it again"):
        dapo_math(tmp_path / "out.jsonl", str(source), QUIET, count=5)
    # What is damaged in the middle is found only on the way.
    as_parquet(source, [dapo(str(number)) for number in range(2000)], row_group_size=500)
    whole = source.read_bytes()
    middle = len(whole) // 2
    source.write_bytes(whole[:middle] + bytes(2000) + whole[middle + 2000 :])
    with pytest.raises(UserError, match=r"a\.parquet cannot be read after row \d+: "):
        dapo_math(tmp_path / "out.jsonl", str(source), QUIET, count=2000)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_file_of_another_data_set_is_told_by_the_columns_it_lacks(tmp_path: Path):
    source = as_parquet(tmp_path / "a.parquet", [{"question": "x"}], arrow.schema({"question": arrow.string()}))
    with pytest.raises(UserError, match=r"has no column prompt, reward_model, only question"):
        dapo_math(tmp_path / "out.jsonl", str(source), QUIET)


def test_what_is_no_source_and_what_is_no_target_is_told_before_anything_is_read(tmp_path: Path):
    source = jsonl(tmp_path / "a.jsonl", [dapo("a")])
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.csv").write_text("x")
    out = tmp_path / "out.jsonl"
    for origin, told in (
        (tmp_path / "none.jsonl", "there is no"),
        (tmp_path / "empty", "holds no"),
        (tmp_path / "a.csv", "is neither"),
    ):
        with pytest.raises(UserError, match=told):
            dapo_math(out, str(origin), QUIET, count=1)
    for target, told in (
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "out.jsonl", "there is no folder"),
        (source, "is a file of the source itself"),
    ):
        with pytest.raises(UserError, match=told):
            dapo_math(target, str(source), QUIET, count=1)
    assert not out.exists()
    assert texts_of_source(source) == ["a"]


def texts_of_source(source: Path) -> list[str]:
    return [json.loads(line)["prompt"][0]["content"] for line in source.read_bytes().splitlines()]


def test_an_interruption_leaves_nothing_and_the_next_call_writes_the_same_bytes(tmp_path: Path, monkeypatch):
    source = jsonl(tmp_path / "a.jsonl", [dapo(str(number % 40)) for number in range(100)])
    dapo_math(tmp_path / "whole.jsonl", str(source), QUIET, count=40)

    def broken(*arguments):
        yield from list(sources.rows(*arguments))[:20]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("scaled.datasets.mathematics.rows", broken)
        dapo_math(tmp_path / "out.jsonl", str(source), QUIET, count=40)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "whole.jsonl"]
    dapo_math(tmp_path / "out.jsonl", str(source), QUIET, count=40)
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_the_command_writes_warns_and_fails_by_its_exit_code(tmp_path: Path):
    rows = [dapo(f"{number} + 1?", str(number + 1)) for number in range(7500)]
    source = as_parquet(tmp_path / "a.parquet", [rows[0], *rows, dapo("x")])
    command = [sys.executable, "-m", "scaled", "data", "dapo-math-7.5k", "out.jsonl"]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "out.jsonl: 7,500 problems of 7,501 rows" in done.stdout
    assert len(load_problems(tmp_path / "out.jsonl")) == 7500
    short = jsonl(tmp_path / "short.jsonl", rows[:3])
    done = subprocess.run([*command, str(short)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "7,497 are missing" in done.stderr
