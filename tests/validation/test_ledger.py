"""The quick ledger as a whole, and the rules by which a verdict is given."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scaled.errors import UserError
from validation import __main__ as command
from validation.claim import Claim, Comparison, Measurement, NotMeasured, Setting
from validation.ledger import claims, judge, measure
from validation.mutants import faults, mutants
from validation.text import rewrite, table

ROOT = Path(__file__).parents[2]
ALL = {f"C{number:02d}" for number in range(1, 28)}
# Figures that the paper measured on models and hardware of its own.
MAY_DIFFER = {"C11", "C13", "C14", "C16", "C24", "C25"}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The quick ledger by its command, with its page."""
    folder = tmp_path_factory.mktemp("ledger")
    options = ["--quick", "--json", str(folder / "ledger.json"), "--html", str(folder / "ledger.html")]
    done = subprocess.run([sys.executable, "-m", "validation", *options], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (folder / "ledger.html").read_text(encoding="utf-8")
    assert page.count("<svg") > 15
    assert not re.search(r'(?:href|src)="(?!#|data:)', page)
    return json.loads((folder / "ledger.json").read_text(encoding="utf-8"))


def test_every_claim_is_measured_and_only_these_may_differ(quick):
    assert [r["id"] for r in quick] == sorted(ALL)
    verdict = {r["id"]: r["verdict"] for r in quick}
    assert {id for id in ALL if verdict[id] == "not measured here"} == set()
    assert {id for id in ALL if verdict[id] == "fails"} == set()
    assert {id for id in ALL if verdict[id] == "differs"} <= MAY_DIFFER
    assert all(r["reason"] for r in quick if r["verdict"] == "differs")


def test_every_figure_has_an_oracle_a_reason_and_a_control_that_fails_by_its_value(quick):
    for record in quick:
        for c in record["comparisons"]:
            assert c["oracle"] and c["reason"] and c["control"] and c["what"], (record["id"], c["what"])
            assert c["control_failed"] and math.isfinite(c["control_measured"]), (record["id"], c["what"])
            assert c["fits"] or c["from_paper"], (record["id"], c["what"])


def test_a_right_ledger_fails_by_chance_less_than_once_in_ten_thousand_runs(quick):
    chances = [c["chance"] for r in quick for c in r["comparisons"]]
    assert all(0 <= chance < 1e-4 for chance in chances)
    assert 0 < sum(chances) < 1e-4


def test_the_table_of_the_readme_is_that_of_the_stored_full_ledger():
    records = json.loads((ROOT / "validation" / "ledger.json").read_text(encoding="utf-8"))
    assert [r["id"] for r in records] == sorted(ALL)
    assert not any(r["quick"] for r in records)
    assert table(records) in (ROOT / "README.md").read_text(encoding="utf-8")


# The rules


FITS = Comparison("x", 1.0, 1.05, 0.1, "why", "by hand", "wrong", 2.0)


@pytest.mark.parametrize(
    ("comparison", "verdict"),
    [
        (FITS, "holds"),
        (replace(FITS, measured=1.1001), "fails"),
        (replace(FITS, measured=math.nan), "fails"),
        (replace(FITS, measured=1.2), "fails"),
        (replace(FITS, measured=1.2, from_paper=True), "differs"),
        (replace(FITS, control_measured=1.09), "fails"),
        (replace(FITS, control_measured=math.nan), "fails"),
        (replace(FITS, control_measured=math.inf), "fails"),
        (replace(FITS, relation="≤", measured=-5.0), "holds"),
        (replace(FITS, relation="≤", measured=-5.0, control_measured=1.1), "fails"),
        (replace(FITS, relation="≥", measured=5.0, control_measured=0.5), "holds"),
        (replace(FITS, relation="≥", measured=0.5, control_measured=0.5), "fails"),
    ],
)
def test_a_figure_fits_within_its_tolerance_and_its_control_must_not(comparison, verdict):
    assert judge(Measurement([comparison], note="a reason"))[0] == verdict
    assert judge(Measurement([FITS, comparison], note="a reason"))[0] == verdict


def test_a_check_that_compares_nothing_fails():
    assert judge(Measurement([]))[0] == "fails"


def test_an_error_in_a_check_is_a_failure_of_that_claim_and_names_its_place():
    def broken(setting: Setting) -> Measurement:
        return 1 / 0

    entry = measure(Claim("X1", "a statement", "nowhere", broken), Setting())
    assert entry.verdict == "fails"
    assert "ZeroDivisionError" in entry.reason
    assert "test_ledger.py" in entry.reason


def test_a_failing_claim_prints_its_figures_and_the_command_that_repeats_it(monkeypatch, capsys):
    def off(setting: Setting) -> Measurement:
        return Measurement([replace(FITS, what="a figure", measured=7.0, unit="nats")])

    monkeypatch.setattr(command, "claims", lambda: {"X1": Claim("X1", "a statement", "§9", off)})
    with pytest.raises(SystemExit) as ended:
        command.main(seed=5, quick=True)
    assert ended.value.code == 1
    out = capsys.readouterr().out
    for part in (
        "X1  fails",
        "a figure: expected 1 nats (by hand), measured 7 nats, tolerance ± 0.1 (why)",
        "seed 5; repeat alone: python -m validation --claims X1 --seed 5 --quick",
        "1 fails",
    ):
        assert part in out


def test_an_unknown_claim_names_the_known_ones():
    done = subprocess.run(
        [sys.executable, "-m", "validation", "--claims", "C01,C99"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "400"},
    )
    assert done.returncode == 2
    assert "no claim is called C99; there are C01, C02" in done.stderr


def test_a_missing_model_is_told_with_the_way_to_get_it(tmp_path):
    with pytest.raises(NotMeasured, match=r"get it by `logra model smollm2 "):
        Setting(models=tmp_path).model_folder()


@pytest.mark.parametrize("kept", ["config.json", "model.safetensors", "model-00001-of-00002.safetensors"])
def test_a_model_folder_with_a_part_missing_is_not_taken_for_a_model(kept, tmp_path):
    folder = tmp_path / "smollm2"
    folder.mkdir()
    (folder / kept).write_text("{}")
    with pytest.raises(
        NotMeasured, match=r"the folder is incomplete, [^\n]+remove it, then `logra model smollm2 [^\n]+$"
    ):
        Setting(models=tmp_path).model_folder()
    for name in ("config.json", "model-00001-of-00002.safetensors"):
        (folder / name).write_text("{}")
    assert Setting(models=tmp_path).model_folder() == folder


def test_seeds_of_different_purposes_have_nothing_in_common():
    seeds = {Setting(seed=seed).derived_seed(name) for seed in range(50) for name in ("a", "b", "a1")}
    assert len(seeds) == 150


def test_each_claim_is_registered_under_an_id_of_its_own():
    assert set(claims()) == ALL


def test_a_table_replaces_what_stood_between_the_marks_and_nothing_else(tmp_path):
    file = tmp_path / "README.md"
    file.write_text("a\n<!-- claims: by a command -->\nold\n<!-- end of claims -->\nz\n")
    for text in ("| new \\1 |", "| newer |"):
        rewrite(file, "claims", text)
        assert file.read_text() == f"a\n<!-- claims: by a command -->\n{text}\n<!-- end of claims -->\nz\n"
    with pytest.raises(UserError, match="mutants"):
        rewrite(file, "mutants", "x")


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.name)
def test_the_text_that_a_mutant_breaks_is_there_once_and_what_it_asks_exists(mutant):
    assert faults(mutant, ALL) == []


def test_there_are_enough_mutants_and_no_two_are_the_same():
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in mutants()}) == len(mutants()) >= 25
