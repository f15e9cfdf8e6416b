"""``python -m validation.mutants`` on a small project: what it refuses, and what it says of a child that crashes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scaled.errors import UserError
from validation import mutants as command
from validation.mutants import Mutant, faults

LEDGER = """
import json, sys
from logra_ref.formula import value
off = {"what": "a figure", "fits": value() == 2, "from_paper": False, "expected": 2, "measured": value()}
off |= {"tolerance": 0, "unit": "", "relation": "="}
of_paper = off | {"what": "the paper's", "fits": False, "from_paper": True}
verdict = "holds" if off["fits"] else "fails"
names = sys.argv[sys.argv.index("--claims") + 1].split(",")
record = {"verdict": verdict, "reason": "why", "comparisons": [of_paper, off]}
failing = {"verdict": "fails", "reason": "always", "comparisons": [off | {"fits": False}]}
records = [(failing if name == "C02" else record) | {"id": name} for name in names]
open(sys.argv[sys.argv.index("--json") + 1], "w").write(json.dumps(records))
"""
TESTS = """
from logra_ref.formula import value

def test_value():
    assert value() == 2
"""
BROKEN = Mutant("three", "formula.py", "return 2", "return 3", ("C01",))


@pytest.fixture
def tried(monkeypatch, tmp_path):
    """Run the command on some mutants of a project of one formula; C01 and test_value.py know it, C02 always fails."""
    for name, text in {
        "logra_ref/__init__.py": "",
        "validation/__init__.py": "",
        "logra_ref/formula.py": "def value():\n    return 2\n",
        "validation/__main__.py": LEDGER,
        "tests/test_value.py": TESTS,
        "tests/test_false.py": "def test_false():\n    assert 1 == 2\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take seconds to import
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "COPIED", ("logra_ref", "validation", "tests"))
    monkeypatch.setattr(command, "claims", lambda: ("C01", "C02"))

    def run(*entries: Mutant, **options) -> int:
        monkeypatch.setattr(command, "mutants", lambda: list(entries))
        with pytest.raises(SystemExit) as ended:
            command.main(**options)
        return ended.value.code

    return run


@pytest.fixture
def untried(monkeypatch):
    """Nothing is run."""
    for name in ("try_mutant", "trouble"):
        monkeypatch.setattr(command, name, lambda _: pytest.fail("something was run"))


def test_a_wrong_value_is_noticed_by_the_figure_that_fits_without_the_mutation(tried, capsys):
    by_test = replace(BROKEN, name="four", new="return 4", claims=(), tests=("tests/test_value.py",))
    assert tried(BROKEN, by_test) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "noticed  three → C01: a figure: expected 2, measured 3"
    assert lines[1].startswith("noticed  four → test_value")


def test_one_that_nothing_notices_lives(tried, capsys):
    assert tried(replace(BROKEN, new="return 2  # as before")) == 1
    assert "LIVES    three → NOTHING" in capsys.readouterr().out


@pytest.mark.parametrize("asked", [{"claims": ("C01",)}, {"claims": (), "tests": ("tests/test_value.py",)}])
@pytest.mark.parametrize(
    ("new", "told"),
    [
        ("return (", "SyntaxError"),
        ("import os; os.write(2, b'farewell'); os._exit(9)", "ended with exit code 9 and printed last: "),
    ],
)
def test_a_child_that_crashes_is_told_with_what_it_printed_last(asked, new, told, tried, capsys):
    assert tried(replace(BROKEN, new=new, **asked)) == 1
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("LIVES"))
    assert line.startswith("LIVES    three → only by an exception: ") and told in line
    if asked["claims"] and "farewell" in new:  # pytest keeps what a test prints
        assert line.endswith("farewell")


@pytest.mark.parametrize("asked", [{"claims": ("C02",)}, {"claims": (), "tests": ("tests/test_false.py",)}])
def test_what_fails_without_a_mutation_notices_nothing(asked, tried, capsys, monkeypatch):
    monkeypatch.setattr(command, "try_mutant", lambda mutant: pytest.fail("a mutant was tried"))
    assert tried(BROKEN, replace(BROKEN, name="four", **asked)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: without any mutation {next(filter(None, asked.values()))[0]} does not hold: ")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"old": "return 7"}, "its text stands 0 times in formula.py, not once"),
        ({"old": "u"}, "its text stands 2 times in formula.py, not once"),
        ({"file": "none.py"}, "there is no logra_ref/none.py"),
        ({"new": "return 2"}, "old and new are the same"),
        ({"claims": ()}, "it names neither claims nor tests"),
        ({"claims": ("C01", "C99")}, "no claim is called C99"),
        ({"tests": ("tests/none.py",)}, "there is no tests/none.py"),
        ({"old": 2}, "name, file, old and new have to be texts"),
    ],
)
def test_entries_that_cannot_be_tried_are_all_told_before_the_first_is(change, fault, tried, untried):
    wrong = replace(BROKEN, name="w", **change)
    assert faults(wrong, ("C01", "C02")) == [f"mutant w: {fault}"]
    with pytest.raises(UserError) as error:
        tried(BROKEN, wrong, wrong)
    assert str(error.value).splitlines() == [f"mutant w: {fault}"] * 2


def test_a_name_that_no_mutant_has_is_an_error_and_not_a_success(tried, untried):
    with pytest.raises(UserError, match="no mutant's name holds “nosuchthing”"):
        tried(BROKEN, only="nosuchthing")


@pytest.mark.parametrize("name", [".", "no/README.md", "unmarked"])
def test_a_readme_that_cannot_be_rewritten_is_told_before_anything_is_run(name, tried, untried, tmp_path):
    (tmp_path / "unmarked").write_text("no marks")
    with pytest.raises(UserError):
        tried(BROKEN, readme=tmp_path / name)


def test_some_mutants_never_replace_the_table_of_all(tried, untried, tmp_path):
    with pytest.raises(UserError, match="leave out --only"):
        tried(BROKEN, only="three", readme=tmp_path / "README.md")


def test_a_file_that_holds_no_mutants_is_told_in_one_line(tmp_path):
    for text in ("- {name: a, nme: b}\n", "- [\n", "7\n"):
        (tmp_path / "mutants.yaml").write_text(text)
        with pytest.raises(UserError, match=r"mutants\.yaml: [^\n]+$"):
            command.mutants(Path(tmp_path / "mutants.yaml"))
