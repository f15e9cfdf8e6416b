"""``python -m validation``: what it refuses before it measures, and what happens to the files it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scaled.errors import UserError
from validation import __main__ as command
from validation.claim import Claim, Comparison, Measurement, NotMeasured, Setting
from validation.ledger import measure
from validation.output import check_target, save
from validation.text import explanation, line, table

ROOT = Path(__file__).parents[2]
FITS = Comparison("a figure", 1.0, 1.05, 0.1, "why", "by hand", "wrong", 2.0)
MARKED = "a\n<!-- claims: by a command -->\n| all | the | rows |\n<!-- end of claims -->\nz\n"


@pytest.fixture
def measured(monkeypatch) -> list[str]:
    """The claims that were measured, in order; X1 and X2 are known, and hold."""
    seen = []

    def check(name: str) -> Claim:
        return Claim(name, "a statement", "§9", lambda setting: seen.append(name) or Measurement([FITS]))

    monkeypatch.setattr(command, "claims", lambda: {name: check(name) for name in ("X1", "X2")})
    return seen


def ended(**options) -> int:
    with pytest.raises(SystemExit) as end:
        command.main(**options)
    return end.value.code


def shell(text: str) -> subprocess.CompletedProcess[str]:
    """A line of the shell, in which ``validation`` is the command, with one claim that takes no time."""
    script = f'validation() {{ "{sys.executable}" -m validation --claims C17 "$@"; }}; {text}'
    # Where no file may grow, Python would cut what it caches of the modules, and every later run would find that.
    uncached = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(["bash", "-c", script], cwd=ROOT, env=uncached, capture_output=True, text=True)


# Files


def test_a_full_disk_leaves_an_older_ledger_whole_and_is_told_in_one_line(tmp_path):
    file = tmp_path / "ledger.json"
    file.write_text("[1]\n")
    done = shell(f"ulimit -f 1; validation --json '{file}'")
    assert (done.returncode, file.read_text()) == (2, "[1]\n")
    assert done.stderr.startswith(f"error: {file} cannot be written: ") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == [file]


def test_a_full_standard_output_is_one_line_and_no_traceback():
    done = shell("validation > /dev/full")
    assert done.returncode == 2
    assert done.stderr == "error: standard output: No space left on device\n"


def test_what_a_link_leads_to_is_written_and_the_link_stays(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    save(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"


def test_a_device_is_no_file_to_be_replaced(tmp_path):
    with pytest.raises(UserError, match="/dev/null is no ordinary file"):
        check_target(Path("/dev/null"))
    check_target(tmp_path / "out")
    script = "from validation.output import check_target, start; start(check_target)"
    with (tmp_path / "out").open("w") as out:
        done = subprocess.run([sys.executable, "-c", script, tmp_path / "out"], stdout=out, stderr=subprocess.PIPE)
    assert done.returncode == 2 and b"takes the lines that are printed" in done.stderr


@pytest.mark.parametrize("option", ["json_file", "html_file", "readme"])
@pytest.mark.parametrize(("name", "message"), [(".", "folder|directory"), ("no/file", "does not exist|No such file")])
def test_a_file_that_cannot_be_written_is_told_before_the_first_claim(option, name, message, measured, tmp_path):
    with pytest.raises(UserError, match=message):
        command.main(**{option: tmp_path / name})
    assert measured == []


@pytest.mark.parametrize("text", [None, "no marks", MARKED.replace("end of claims", "end")])
def test_a_readme_without_a_place_for_the_table_is_told_before_the_first_claim(text, measured, tmp_path):
    file = tmp_path / "README.md"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=r"README\.md"):
        command.main(readme=file)
    assert measured == []


@pytest.mark.parametrize("option", [{"chosen": "X1"}, {"quick": True}])
def test_a_part_of_the_ledger_never_replaces_the_readmes_table(option, measured, tmp_path):
    file = tmp_path / "README.md"
    file.write_text(MARKED)
    with pytest.raises(UserError, match="leave out --claims and --quick"):
        command.main(readme=file, **option)
    assert (measured, file.read_text()) == ([], MARKED)


def test_the_whole_ledger_goes_to_the_readme_and_to_json(measured, tmp_path):
    file = tmp_path / "README.md"
    file.write_text(MARKED)
    assert ended(readme=file, json_file=tmp_path / "ledger.json") == 0
    records = json.loads((tmp_path / "ledger.json").read_text())
    assert [r["id"] for r in records] == measured == ["X1", "X2"]
    assert file.read_text() == MARKED.replace("| all | the | rows |", table(records))


# Names


@pytest.mark.parametrize("chosen", ["", ",", " , "])
def test_no_name_is_not_every_claim(chosen, measured):
    with pytest.raises(UserError, match="names no claim; there are X1, X2"):
        command.main(chosen=chosen)
    assert measured == []


def test_a_claim_named_twice_or_in_lower_case_is_measured_once(measured):
    assert ended(chosen="x2,X2, X1,x2") == 0
    assert measured == ["X2", "X1"]


# What could not be measured


def test_parts_that_were_not_measured_are_in_the_line_the_table_and_the_record():
    found = Measurement([FITS], not_measured=["real gradients", "the model"])
    record = measure(Claim("X1", "a statement", "§9", lambda setting: found), Setting()).record()
    assert record["verdict"] == "holds"
    assert record["not_measured"] == ["real gradients", "the model"]
    assert "controls failed as they must; not measured here: real gradients, the model |" in line(record)
    assert "| holds (1 of 1 figures; not measured here: real gradients, the model) |" in table([record])


@pytest.mark.parametrize("error", [NotMeasured, ValueError])
def test_a_reason_of_several_lines_is_one_line_and_told_once(error):
    def broken(setting: Setting) -> Measurement:
        raise error("first\n  second\n\nthird")

    record = measure(Claim("X1", "a statement", "§9", broken), Setting()).record()
    told = f"{line(record)}\n{explanation(record)}"
    assert "first second third" in record["reason"] and "\n" not in record["reason"]
    assert told.count("first") == 1
