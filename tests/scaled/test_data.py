from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaled.config_data import DataConfig
from scaled.data import ProblemStream, load_data, load_problems
from scaled.errors import UserError
from scaled.records import Problem

GOOD = {"messages": [{"role": "user", "content": "2 + 2?"}], "answer": "4"}


def row(text: str, answer: str = "4", **more: object) -> dict:
    return {"messages": [{"role": "user", "content": text}], "answer": answer, **more}


def write(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def messages_of(problems: list[Problem]) -> set[str]:
    return {json.dumps(problem.messages) for problem in problems}


# Reading


def test_a_row_is_read_with_its_defaults(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", GOOD, row("b", id="second", source="book", difficulty=float("nan")))
    first, second = load_problems(path)
    assert first == Problem(f"{path}:1", ({"role": "user", "content": "2 + 2?"},), "4", "")
    assert (second.id, second.source) == ("second", "book")
    assert (first.verifier, first.metadata) == ("", {})
    assert first.metadata is not second.metadata


def test_the_verifier_and_what_it_needs_are_read(tmp_path: Path):
    entry = {"dataset": "codeio", "entry": {"answer": "4", "metadata": {"nested": [None, 1.5]}}}
    path = write(tmp_path / "a.jsonl", row("a", verifier="reasoning-gym", metadata=entry), row("b", verifier=""))
    first, second = load_problems(path)
    assert (first.verifier, first.metadata) == ("reasoning-gym", entry)
    assert second.verifier == ""


def test_numbers_are_taken_as_their_text(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", row("a", answer=7), row("b", answer=-0.5), row("c", answer=10**30, id=3))
    problems = load_problems(path)
    assert [problem.answer for problem in problems] == ["7", "-0.5", "1" + "0" * 30]
    assert problems[2].id == "3"


def test_byte_order_mark_crlf_blank_lines_and_a_missing_last_newline_are_no_errors(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    line = json.dumps(GOOD).encode()
    path.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\r\n  \n" + line)
    assert [problem.id for problem in load_problems(path)] == [f"{path}:1", f"{path}:4"]


def test_a_line_separator_inside_a_string_does_not_end_the_row(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    text = "one\u2028two\u0085three"
    path.write_text(json.dumps(row(text), ensure_ascii=False), encoding="utf-8")
    assert load_problems(path)[0].messages[0]["content"] == text


def test_a_row_of_a_megabyte_is_read(tmp_path: Path):
    text = "é" * 500_000
    assert load_problems(write(tmp_path / "a.jsonl", row(text)))[0].messages[0]["content"] == text


MESSAGES = '"messages": [{"role": "user", "content": "x"}]'
BAD_ROWS = {
    b'{"messages": ': "not valid JSON",
    b"[" * 100_000: "not valid JSON",
    b'{"n": ' + b"1" * 5000 + b"}": "not valid JSON",
    b'{"answer": "\xff"}': "byte 13 is not UTF-8",
    b'"text"': "not an object",
    b'{"answer": "4"}': "`messages` is missing",
    b'{"messages": null, "answer": "4"}': "`messages` is missing",
    b'{"messages": [], "answer": "4"}': "`messages` is []",
    b'{"messages": "hello", "answer": "4"}': "`messages` is 'hello'",
    b'{"messages": ["hello"], "answer": "4"}': "message 1 is 'hello'",
    b'{"messages": [{"role": "human", "content": "x"}], "answer": "4"}': "`role` is 'human'; use one of system, user",
    b'{"messages": [{"role": ["user"], "content": "x"}], "answer": "4"}': "`role` is ['user']",
    b'{"messages": [{"role": "user", "content": 5}], "answer": "4"}': "`content` is 5; give a string",
    b'{"messages": [{"role": "user"}], "answer": "4"}': "`content` is None; give a string",
    b'{"messages": [{"role": "system", "content": "x"}], "answer": "4"}': "the last message is the system's",
    f"{{{MESSAGES}}}".encode(): "`answer` is missing",
    f'{{{MESSAGES}, "answer": null}}'.encode(): "`answer` is missing",
    f'{{{MESSAGES}, "answer": NaN}}'.encode(): "`answer` is nan",
    f'{{{MESSAGES}, "answer": 1e999}}'.encode(): "`answer` is inf",
    f'{{{MESSAGES}, "answer": true}}'.encode(): "`answer` is True",
    f'{{{MESSAGES}, "answer": ["4"]}}'.encode(): "`answer` is ['4']",
    f'{{{MESSAGES}, "answer": "  "}}'.encode(): "`answer` is '  '",
    f'{{{MESSAGES}, "answer": "4", "id": 1.5}}'.encode(): "`id` is 1.5",
    f'{{{MESSAGES}, "answer": "4", "source": 7}}'.encode(): "`source` is 7",
    f'{{{MESSAGES}, "answer": "4", "verifier": "maths"}}'.encode(): "`verifier` is 'maths'; use one of math, exact, r",
    f'{{{MESSAGES}, "answer": "4", "verifier": null}}'.encode(): "`verifier` is None",
    f'{{{MESSAGES}, "answer": "4", "verifier": ["math"]}}'.encode(): "`verifier` is ['math']",
    f'{{{MESSAGES}, "answer": "4", "metadata": "x"}}'.encode(): "`metadata` is 'x'; give an object",
    f'{{{MESSAGES}, "answer": "4", "metadata": null}}'.encode(): "`metadata` is None",
    f'{{{MESSAGES}, "answer": "\\ud83d"}}'.encode(): "\\ud83d is half of a surrogate pair",
    f'{{{MESSAGES}, "answer": "1", "metadata": {{"a": ["\\ud83d"]}}}}'.encode(): "\\ud83d is half of a surrogate pair",
}


@pytest.mark.parametrize(("line", "text"), BAD_ROWS.items(), ids=BAD_ROWS.values())
def test_a_bad_row_is_named_with_file_line_and_fault(tmp_path: Path, line: bytes, text: str):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(UserError) as caught:
        load_problems(path)
    assert f"{path}:3: " in str(caught.value)
    assert text in str(caught.value)


def test_the_first_twenty_bad_rows_are_reported_at_once_and_the_others_counted(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", *([{"answer": "4"}] * 23), GOOD)
    with pytest.raises(UserError) as caught:
        load_problems(path)
    lines = str(caught.value).splitlines()
    assert [f"{path}:{number}:" in line for number, line in enumerate(lines[1:21], start=1)] == [True] * 20
    assert "23" in lines[0]
    assert lines[21:] == ["… and 3 more"]


def test_an_id_used_twice_is_reported_with_both_lines(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", row("a", id="7"), GOOD, row("b", id=7))
    with pytest.raises(UserError, match=r"a.jsonl:3: `id` '7' is that of line 1 too"):
        load_problems(path)


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"\xef\xbb\xbf"])
def test_a_file_without_rows_is_an_error(tmp_path: Path, content: bytes):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match="has no rows"):
        load_problems(path)


def test_what_cannot_be_opened_is_an_error_that_names_it(tmp_path: Path):
    loop = tmp_path / "loop.jsonl"
    loop.symlink_to(loop)
    for path in (tmp_path / "none.jsonl", tmp_path, loop):
        with pytest.raises(UserError, match=r"cannot be read|no ordinary file") as caught:
            load_problems(path)
        assert str(path) in str(caught.value)


# Splitting


@given(held_out=st.integers(0, 609), seed=st.integers(0, 2**32))
def test_commuted_pairs_are_never_on_both_sides_and_the_count_is_exact(held_out: int, seed: int):
    train, held = load_data(DataConfig(task="arithmetic", held_out=held_out), seed)
    assert len(held) == held_out
    assert len(train) + len(held) == len({problem.id for problem in train + held}) == 610
    swapped = {"+".join(reversed(p.id.removeprefix("arithmetic/").split("+"))) for p in train if "+" in p.id}
    assert swapped.isdisjoint(problem.id.removeprefix("arithmetic/") for problem in held)


def test_the_split_follows_from_the_seed_alone():
    config = DataConfig(task="arithmetic", held_out=256)
    assert load_data(config, 3) == load_data(config, 3)
    sides = [{problem.id for problem in load_data(config, seed)[1]} for seed in (3, 4)]
    # Two independent draws of 256 of 610 share 107 on average, with a standard deviation of about 8.
    assert 70 < len(sides[0] & sides[1]) < 145


def test_the_split_is_the_one_that_earlier_versions_made():
    _, held = load_data(DataConfig(task="arithmetic", held_out=4), 0)
    assert [problem.id for problem in held] == [
        "arithmetic/2-1",
        "arithmetic/7-0",
        "arithmetic/17-8",
        "arithmetic/19-15",
    ]


@given(
    copies=st.lists(st.integers(1, 4), min_size=1, max_size=12), held_out=st.integers(0, 20), seed=st.integers(0, 99)
)
def test_rows_with_equal_messages_stay_together_and_the_count_is_exact_where_it_can_be(
    tmp_path_factory: pytest.TempPathFactory, copies: list[int], held_out: int, seed: int
):
    rows = [row(f"question {q}", answer=str(copy)) for q, number in enumerate(copies) for copy in range(number)]
    path = write(tmp_path_factory.getbasetemp() / "copies.jsonl", *rows)
    sums = {0}
    for number in copies:
        sums |= {total + number for total in sums}
    config = DataConfig(file=path, held_out=held_out)
    if held_out >= len(rows) or held_out not in sums:
        with pytest.raises(UserError, match="leaves nothing to train on" if held_out >= len(rows) else "cannot be met"):
            load_data(config, seed)
    else:
        train, held = load_data(config, seed)
        assert len(held) == held_out
        assert sorted(p.id for p in train + held) == sorted(p.id for p in load_problems(path))
        assert messages_of(train).isdisjoint(messages_of(held))


def test_a_count_that_cannot_be_met_is_an_error_with_the_nearest_that_can(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", *([row("a")] * 3), *([row("b")] * 3))
    with pytest.raises(UserError, match=r"set data.held_out=3$"):
        load_data(DataConfig(file=path, held_out=5), 0)


def test_a_held_out_file_is_used_whole_and_the_training_file_too(tmp_path: Path):
    train_file = write(tmp_path / "train.jsonl", row("a"), row("b"))
    held_file = write(tmp_path / "held.jsonl", row("c"), row("d"), row("e"))
    train, held = load_data(DataConfig(file=train_file, held_out_file=held_file), 0)
    assert (train, held) == (load_problems(train_file), load_problems(held_file))


def test_an_overlap_of_the_files_is_found_by_messages_even_where_id_and_answer_differ(tmp_path: Path):
    train_file = write(tmp_path / "train.jsonl", row("a", id="one"), row("b", id="two"), row("b", id="three"))
    held_file = write(tmp_path / "held.jsonl", row("c", id="four"), row("b", id="five", answer="9"), row("a", id="six"))
    with pytest.raises(UserError, match=r"held.jsonl: 2 of 3 rows .* first is 'five' \(there 'two'\)"):
        load_data(DataConfig(file=train_file, held_out_file=held_file), 0)


# The stream


def problems(count: int) -> list[Problem]:
    return [Problem(str(i), ({"role": "user", "content": str(i)},), str(i)) for i in range(count)]


@given(size=st.integers(1, 30), seed=st.integers(0, 2**62), takes=st.lists(st.integers(0, 40), max_size=8))
def test_any_sequence_of_takes_with_restarts_gives_the_same_stream(size: int, seed: int, takes: list[int]):
    whole = ProblemStream(problems(size), seed).take(0, sum(takes))
    position, parts = 0, []
    for count in takes:
        parts += ProblemStream(problems(size), seed).take(position, count)  # a new object: resumed from the integer
        position += count
    assert parts == whole


@given(size=st.integers(1, 30), seed=st.integers(0, 2**62), epochs=st.integers(1, 4))
def test_each_epoch_holds_every_problem_once(size: int, seed: int, epochs: int):
    taken = ProblemStream(problems(size), seed).take(0, size * epochs)
    for epoch in range(epochs):
        assert {p.id for p in taken[epoch * size : (epoch + 1) * size]} == {p.id for p in problems(size)}


@given(size=st.integers(2, 30), batch=st.integers(1, 70), seed=st.integers(0, 2**62))
def test_a_batch_across_the_edge_of_an_epoch_loses_and_repeats_nothing(size: int, batch: int, seed: int):
    stream = ProblemStream(problems(size), seed)
    before, after = stream.take(size - 1, 1 + batch)[:1], stream.take(size, batch)
    assert {p.id for p in stream.take(0, size - 1) + before} == {p.id for p in problems(size)}
    assert len({p.id for p in after[:size]}) == min(size, batch)


def test_the_order_differs_between_epochs_and_seeds_and_positions_may_be_taken_in_any_order():
    stream = ProblemStream(problems(50), 1)
    epochs = [stream.take(50 * epoch, 50) for epoch in (2, 0, 1)]
    orders = [[p.id for p in taken] for taken in [*epochs, ProblemStream(problems(50), 2).take(0, 50), problems(50)]]
    assert len({tuple(order) for order in orders}) == 5
    assert stream.take(0, 50) == epochs[1]


def test_the_order_is_the_one_that_earlier_versions_made():
    assert [p.id for p in ProblemStream(problems(5), 0).take(3, 7)] == ["0", "3", "3", "4", "2", "0", "1"]


def test_a_stream_of_nothing_is_refused():
    with pytest.raises(UserError, match="no problems"):
        ProblemStream([], 0)
